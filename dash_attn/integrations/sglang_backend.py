"""SGLang's attention backend dash_attn, which `dash_attn.integrations.sglang.register` makes known to SGLang.

A row has the bits of a forward for training, whatever else is in the batch and wherever the radix cache found its keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from ..kvcache import Cache, NewKeys, attend
from .sglang import NAME

_PAGE_ROWS = 16  # pages of other sizes would be copied, except in decoding


@dataclasses.dataclass
class Batch:
    """The batch of a step: the queries of a sequence are the last rows of its keys."""

    cu_seqlens_q: Tensor | None
    """int32 (sequences + 1,): the offsets of the sequences' queries; None if each sequence has one query."""
    seq_lens: Tensor
    """int32 (sequences,): the number of keys, including those of this step."""
    page_table: Tensor
    """int32 (sequences, pages of the longest sequence)."""


class DashAttentionBackend(AttentionBackend):
    """Causal self-attention over paged keys in bf16 or fp16, with windows, soft caps and sinks, without CUDA graphs.

    Args:
        model_runner: SGLang's runner, whose pools of keys the backend reads and writes.

    Raises:
        NotImplementedError: dash_attn does not support a setting; the message names the setting.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config, parallel, pool = model_runner.model_config, get_parallel(), model_runner.token_to_kv_pool
        page_size, dtype = model_runner.page_size, model_runner.kv_cache_dtype
        _require(page_size % _PAGE_ROWS == 0, "page_size", f"a multiple of {_PAGE_ROWS} (--page-size 64)", page_size)
        _require(dtype in (torch.bfloat16, torch.float16), "kv_cache_dtype", "bfloat16 or float16", dtype)
        _require(not model_runner.use_mla_backend, "models", "without MLA", config.hf_config.architectures)
        _require(not config.is_encoder_decoder, "models", "without cross attention", config.hf_config.architectures)
        _require(not isinstance(pool, SWAKVPool), "one pool of keys", "(--disable-hybrid-swa-memory)", type(pool))
        _require(parallel.attn_cp_size == 1, "attn_cp_size", "1", parallel.attn_cp_size)
        _require(not parallel.dcp_enabled, "dcp_enabled", "False", parallel.dcp_enabled)
        self.page_size, self.token_to_kv_pool = page_size, pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.forward_metadata: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, self.forward_metadata = forward_batch.forward_mode, None
        if mode.is_idle():
            return
        is_known = (mode.is_decode() or mode.is_extend()) and forward_batch.spec_info is None
        _require(is_known, "batches", "that decode or extend, without speculative decoding", mode)
        seq_lens = forward_batch.seq_lens.int()
        cu_seqlens_q = None
        if not mode.is_decode():
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))
        starts = torch.arange(0, int(forward_batch.seq_lens_cpu.max()), self.page_size, device=seq_lens.device)
        places = self.req_to_token[forward_batch.req_pool_indices[:, None], starts]
        self.forward_metadata = Batch(cu_seqlens_q, seq_lens, (places // self.page_size).int())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError(f"{NAME} must run without CUDA graphs (--disable-cuda-graph)")

    def support_triton(self) -> bool:
        return False

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Writes new keys to SGLang's pool and computes attention.

        Args:
            q: (rows, heads * head_dim).
            k: (rows, kv_heads, head_dim), or None for a layer that shares the keys of another layer.
            v: (rows, kv_heads, value_head_dim), or None.
            layer: SGLang's RadixAttention.
            forward_batch: SGLang's batch.
            save_kv_cache: whether k and v are written; if not, the pool holds them already.
            sinks: (heads,), learned sinks.
            **others: must be None or False.

        Returns:
            (rows, heads * value_head_dim).
        """
        batch = self.forward_metadata
        assert batch is not None, "SGLang calls init_forward_metadata first"
        given = {name: x for name, x in others.items() if x is not None and x is not False}
        _require(not given, "calls", "without other arguments", sorted(given))
        is_decoder = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
        _require(is_decoder, "attn_type", "decoder", layer.attn_type)
        _require(layer.xai_temperature_len <= 0, "xai_temperature_len", "-1", layer.xai_temperature_len)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v)
        k_pages, v_pages = (x.unflatten(0, (-1, self.page_size)) for x in self._buffers(layer.layer_id))
        # SGLang's windows do not count the query itself.
        window = layer.sliding_window_size
        rows = (-1,) if batch.cu_seqlens_q is not None else (-1, 1)
        out, _ = attend(
            q.view(*rows, layer.tp_q_head_num, layer.qk_head_dim),
            Cache(k_pages, v_pages, batch.seq_lens, table=batch.page_table), NewKeys(), cu_seqlens_q=batch.cu_seqlens_q,
            softmax_scale=layer.scaling, causal=True, window_size=(-1, -1) if window < 0 else (window, 0),
            softcap=layer.logit_cap or 0.0, s_aux=sinks,
        )  # fmt: skip
        return out.flatten(-2).flatten(0, -2)

    def _buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values, (places, kv_heads, head_dim)."""
        buffers = self.token_to_kv_pool.get_key_buffer(layer), self.token_to_kv_pool.get_value_buffer(layer)
        shapes = [tuple(x.shape) for x in buffers]
        _require(all(x.dim() == 3 for x in buffers), "buffers", "of (places, kv_heads, head_dim)", shapes)
        return buffers


def _require(is_met: bool, name: str, allowed: str, value: object) -> None:
    if not is_met:
        raise NotImplementedError(f"{NAME} must have {name} {allowed}, got {value}")
