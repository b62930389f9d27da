"""The classes of vLLM's attention backend DASH_ATTN, which `dash_attn.integrations.vllm.register` makes known to vLLM.

Each call appends the new keys to vLLM's pages and computes attention over them. A row has the bits of a forward for
training, whatever else is in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..kvcache import Cache, NewKeys, attend
from .vllm import NAME

_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class DashAttentionBackend(AttentionBackend):
    """Causal self-attention over paged keys in bf16 or fp16, with windows, soft caps, ALiBi and sinks."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[DashAttentionImpl]:
        return DashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DashAttentionMetadataBuilder]:
        return DashAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]  # pages of other sizes would be copied, except in decoding

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) == (9, 0)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclasses.dataclass
class DashAttentionMetadata(AttentionMetadata):
    """The batch of a step: the queries of a sequence are the last rows of its keys."""

    rows: int
    """The number of rows of the batch, which may include padding after the last sequence."""
    decodes: bool
    """Whether every sequence has one query. The call then needs no offsets, and is faster without."""
    query_start_loc: Tensor
    """int32 (sequences + 1,): the offsets of the sequences' queries."""
    past_lens: Tensor
    """int32 (sequences,): the number of keys that the pages already hold."""
    seq_lens: Tensor
    """int32 (sequences,): the number of keys, including those of this step."""
    block_table: Tensor
    """int32 (sequences, max_blocks)."""


class DashAttentionMetadataBuilder(AttentionMetadataBuilder[DashAttentionMetadata]):
    """Attention stays outside of vLLM's CUDA graphs (`_cudagraph_support` of the base class)."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DashAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(f"{NAME} must have causal=True in every batch, got {common.causal}")
        decodes = common.max_query_len == 1 and common.num_actual_tokens == len(common.seq_lens)
        return DashAttentionMetadata(
            rows=common.num_actual_tokens,
            decodes=decodes,
            query_start_loc=common.query_start_loc,
            # A sequence of padding has no keys: with -1 before the step, the append leaves it out.
            past_lens=common.seq_lens - (1 if decodes else common.query_start_loc.diff()),
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
        )


class DashAttentionImpl(AttentionImpl[DashAttentionMetadata]):
    """The attention of one layer. The arguments are those that vLLM gives every implementation.

    Raises:
        NotImplementedError: dash_attn does not support a setting; the message names the setting.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        _require(kv_cache_dtype in _CACHE_DTYPES, "kv_cache_dtype", f"one of {_CACHE_DTYPES}", kv_cache_dtype)
        _require(attn_type == AttentionType.DECODER, "attn_type", AttentionType.DECODER.value, attn_type)
        _require(alibi_slopes is None or not logits_soft_cap, "alibi_slopes", "None with a soft cap", alibi_slopes)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.appends = kv_sharing_target_layer_name is None
        self.window_size = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: DashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Appends keys to the pages and computes attention.

        Args:
            layer: ignored: it holds scales of quantized caches.
            query: (rows or more, num_heads, head_size).
            key: (rows or more, num_kv_heads, head_size).
            value: (rows or more, num_kv_heads, value_head_size).
            kv_cache: (num_blocks, num_kv_heads, block_size, head_size + value_head_size), any layout.
            attn_metadata: None while vLLM measures memory; the output is then 0.
            output: (rows or more, num_heads, value_head_size), which is written.
            output_scale: must be None.
            output_block_scale: must be None.
        """
        _require(output_scale is None, "output_scale", "None (no quantized output)", output_scale)
        _require(output_block_scale is None, "output_block_scale", "None (no quantized output)", output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        batch, offsets = attn_metadata, None if attn_metadata.decodes else attn_metadata.query_start_loc

        def rows_of(x: Tensor) -> Tensor:
            return x[: batch.rows, None] if batch.decodes else x[: batch.rows]

        pages = kv_cache.transpose(1, 2)
        new, lens = NewKeys(), batch.seq_lens
        if self.appends:
            new, lens = NewKeys(rows_of(key), rows_of(value), cu_seqlens=offsets), batch.past_lens
        cache = Cache(pages[..., : self.head_size], pages[..., self.head_size :], lens, table=batch.block_table)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        out, _ = attend(
            rows_of(query), cache, new, cu_seqlens_q=offsets, softmax_scale=self.scale, causal=True,
            window_size=self.window_size, softcap=self.softcap, alibi_slopes=self.alibi_slopes, s_aux=self.sinks,
        )  # fmt: skip
        rows_of(output).copy_(out)
        return output


def _require(is_met: bool, name: str, allowed: str, value: object) -> None:
    if not is_met:
        raise NotImplementedError(f"{NAME} must have {name} {allowed}, got {value!r}")
