"""dash_attn as the core attention of Megatron-core: wrap a model's layer spec in `with_dash_attention(spec)`.

This module imports megatron-core. docs/integrations/megatron.md lists the versions that were tested.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from .. import flash_attn_func, flash_attn_varlen_func
from ..checks import check_values

__all__ = ["DashAttention", "with_dash_attention"]

Spec = TypeVar("Spec")
_REPLACED = ("DotProductAttention", "TEDotProductAttention")
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)
_ONE_RANK = "{} (use dash_attn.distributed for context parallelism, which this integration does not support)"
# Settings that ask for a different attention, or for more results than the output.
_OFF = ("fp8_dot_product_attention", "fp8_multi_head_attention", "qk_clip", "log_max_attention_logit")


def with_dash_attention(spec: Spec) -> Spec:
    """Returns a copy of a spec in which every core attention is `DashAttention`.

    Args:
        spec: a ModuleSpec of a layer, or the submodules of a block, as megatron.core.models.*.get_*_spec return them,
            whose core attention is Megatron's DotProductAttention or TEDotProductAttention.

    Returns:
        A new spec; `spec` is not changed.

    Raises:
        ValueError: the spec has no core attention, or one of another class.
    """
    replaced: list[str] = []
    result = _replace(spec, replaced)
    if not replaced:
        raise ValueError(f"spec must hold a core_attention, got {type(spec).__name__} without one")
    return result


class DashAttention(MegatronModule):
    """Core attention with deterministic gradients: (seqlen, batch, heads, head_dim) to (seqlen, batch, hidden).

    Args:
        config: attention_dropout must be 0, context_parallel_size must be 1, and params_dtype must be bf16 or fp16.
            window_size, window_attn_skip_freq and softmax_type are supported.
        layer_number: the number of the layer, from 1.
        attn_mask_type: the mask of calls that do not give one.
        attention_type: "self" or "cross".
        attention_dropout: None for the config's.
        softmax_scale: None for 1 / sqrt(head_dim).
        k_channels: the head dim of keys in multi-latent attention; ignored, because the tensors show it.
        v_channels: the head dim of values in multi-latent attention; ignored, because the tensors show it.
        cp_comm_type: ignored, because only context parallelism uses it.
        num_splits: must be None or 1.
        pg_collection: None for Megatron's global groups.

    Raises:
        NotImplementedError: dash_attn does not support a setting of the config; the message names the setting.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None, k_channels: int | None = None, v_channels: int | None = None,
        num_splits: int | None = None, cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _require(dropout == 0, "attention_dropout", "0.0 (--attention-dropout 0)", dropout)
        ranks = config.context_parallel_size
        _require(ranks == 1, "context_parallel_size", _ONE_RANK.format(1), ranks)
        for name in _OFF:
            _require(not getattr(config, name, False), name, "False", getattr(config, name, False))
        _require(num_splits in (None, 1), "num_splits", "None or 1", num_splits)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection(tp=parallel_state.get_tensor_model_parallel_group())
        self.tp_group = pg_collection.tp
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = tuple(config.window_size) if windowed else (-1, -1)
        self._add_sinks(config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None, packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes the attention of query, key and value.

        Args:
            query: (seqlen_q, batch, heads, head_dim), bf16 or fp16; (total_q, heads, head_dim) in a variable-length
                batch.
            key: like query with seqlen_k or total_k, and with kv_heads, which must divide heads.
            value: like key, with value_head_dim instead of head_dim.
            attention_mask: None, or bool, True where a query does not see a key. With the types padding and
                padding_causal: (batch, 1, 1, seqlen), with the padding at the end of each sequence. With causal and
                causal_bottom_right: exactly the causal mask, (1 or batch, 1, seqlen_q, seqlen_k), as Megatron passes
                it; a mask that separates documents, as --reset-attention-mask makes it, is an error. On a GPU the error
                is raised on the device, without waiting. Ignored with no_mask and in a variable-length batch.
            attn_mask_type: padding, causal, no_mask, padding_causal or causal_bottom_right; None for the module's.
            attention_bias: must be None.
            packed_seq_params: the offsets of a variable-length batch, with qkv_format "thd". If cu_seqlens_*_padded are
                given, they are the starts of the sequences, and cu_seqlens_* give their lengths.
            num_splits: must be None or 1.

        Returns:
            (seqlen_q, batch, heads * value_head_dim), or (total_q, heads * value_head_dim); 0 at padding.

        Raises:
            NotImplementedError: an argument asks for something that is not supported.
            ValueError: an argument has the wrong shape or value.
        """
        one_mask = attention_mask is None or isinstance(attention_mask, Tensor)
        _require(one_mask, "attention_mask", "None or one tensor", f"a {type(attention_mask).__name__}")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        _require(mask_type != AttnMaskType.arbitrary, "attn_mask_type", "a type other than arbitrary", mask_type)
        _require(attention_bias is None, "attention_bias", "None", "a tensor")
        _require(num_splits in (None, 1), "num_splits", "None or 1", num_splits)
        arguments: dict[str, Any] = {
            "softmax_scale": self.softmax_scale, "causal": mask_type in _CAUSAL, "window_size": self.window_size
        }  # fmt: skip
        if packed_seq_params is not None:
            return self._attend_pack(query, key, value, mask_type, packed_seq_params, arguments)
        if mask_type == AttnMaskType.causal and query.shape[0] != key.shape[0]:
            raise ValueError(
                "query and key must have the same length with attn_mask_type causal (causal_bottom_right aligns the "
                f"last ones), got {query.shape[0]} and {key.shape[0]}"
            )
        if mask_type in _PADDED and attention_mask is not None:
            return self._attend_padded(query, key, value, attention_mask, arguments)
        if arguments["causal"] and attention_mask is not None:
            _require_causal(attention_mask, query.shape[0], key.shape[0], query.shape[1])
        # Heads are independent, so the heads of all sequences are placed side by side: no tensor is transposed.
        batch = query.shape[1]
        sinks = None if self.softmax_offset is None else self.softmax_offset.repeat(batch)
        q, k, v = (x.flatten(1, 2).unsqueeze(0) for x in (query, key, value))
        out = cast(Tensor, flash_attn_func(q, k, v, learnable_sink=sinks, **arguments))
        return out.view(query.shape[0], batch, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the learnable sinks, sharded over the heads of tensor-parallel ranks."""
        learnable = self.config.softmax_type == "learnable"
        state = self.state_dict(prefix="", keep_vars=True) if learnable else {}
        groups = {"tp_group": self.tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def _add_sinks(self, config: TransformerConfig) -> None:
        """Adds softmax_offset: None, or one sink per head of this rank, under the name that checkpoints use."""
        kind = config.softmax_type
        _require(kind in ("vanilla", "off-by-one", "learnable"), "softmax_type", "vanilla, off-by-one, learnable", kind)
        if kind == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.zeros(heads, device=device, dtype=config.params_dtype)
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", sinks, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(sinks)
        # Each rank has its own heads, which the norm of the gradients must count.
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def _attend_padded(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        seqlen, batch = query.shape[:2]
        if key.shape[0] != seqlen or tuple(attention_mask.shape) != (batch, 1, 1, seqlen):
            raise ValueError(
                "attention_mask must be (batch, 1, 1, seqlen) for both queries and keys, "
                f"({batch}, 1, 1, {seqlen}), got {tuple(attention_mask.shape)} with {key.shape[0]} keys"
            )
        padding = attention_mask.reshape(batch, seqlen).to(torch.bool)
        at_the_end = (padding[:, 1:] >= padding[:, :-1]).all()
        check_values(at_the_end, "attention_mask must have its padding at the end of each sequence, got some elsewhere")
        lengths = (~padding).sum(dim=1, dtype=torch.int32)
        offsets = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=query.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        arguments |= {"seqused_q": lengths, "seqused_k": lengths, "learnable_sink": self.softmax_offset}
        out = cast(Tensor, flash_attn_varlen_func(q, k, v, offsets, offsets, seqlen, seqlen, **arguments))
        return out.view(batch, seqlen, -1).transpose(0, 1)

    def _attend_pack(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask_type: AttnMaskType,
        packed: PackedSeqParams,
        arguments: dict[str, Any],
    ) -> Tensor:
        _require(packed.qkv_format == "thd", "packed_seq_params.qkv_format", "'thd'", packed.qkv_format)
        group = getattr(packed, "cp_group", None)
        ranks = 1 if group is None else group.size()
        _require(ranks == 1, "packed_seq_params.cp_group", _ONE_RANK.format("of one rank"), ranks)
        if arguments["causal"] and self.attention_type == "cross" and mask_type != AttnMaskType.causal_bottom_right:
            _require(False, "attn_mask_type", "no_mask, padding or causal_bottom_right in a cross attention", mask_type)
        offsets_q, used_q = _rows_of(packed.cu_seqlens_q, packed.cu_seqlens_q_padded)
        offsets_k, used_k = _rows_of(packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded)
        # The maximum lengths are only hints, which packed_seq_params may lack.
        longest_q, longest_k = (0 if x is None else x for x in (packed.max_seqlen_q, packed.max_seqlen_kv))
        arguments |= {"seqused_q": used_q, "seqused_k": used_k, "learnable_sink": self.softmax_offset}
        out = flash_attn_varlen_func(query, key, value, offsets_q, offsets_k, longest_q, longest_k, **arguments)
        return cast(Tensor, out).flatten(1)


def _rows_of(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the offsets, and the lengths in use (None for all)."""
    if cu_seqlens_padded is None:
        return cu_seqlens, None
    return cu_seqlens_padded, cu_seqlens[1:] - cu_seqlens[:-1]


def _require_causal(mask: Tensor, seqlen_q: int, seqlen_k: int, batch: int) -> None:
    allowed = [(count, 1, seqlen_q, seqlen_k) for count in dict.fromkeys((1, batch))]
    if tuple(mask.shape) not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise ValueError(
            f"attention_mask must be None or {shapes} with a causal attn_mask_type, got {tuple(mask.shape)}"
        )
    unseen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).triu_(1 + seqlen_k - seqlen_q)
    check_values(
        (mask.to(torch.bool) == unseen).all(),
        "attention_mask must be the causal mask with a causal attn_mask_type, got another mask: drop "
        "--reset-attention-mask, and pass packed documents as packed_seq_params",
    )  # fmt: skip


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise NotImplementedError(f"{name} must be {allowed}, got {value}: dash_attn supports no other value")


def _replace(node: Any, replaced: list[str]) -> Any:
    if isinstance(node, dict):
        # Keeps the class of the mapping, such as OrderedDict.
        result = copy.copy(node)
        result.update((name, _replace_named(name, item, replaced)) for name, item in node.items())
        return result
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_replace_named(name, item, replaced) for name, item in zip(node._fields, node)))
    if isinstance(node, (list, tuple)):
        return type(node)(_replace(item, replaced) for item in node)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    changed: Any = copy.copy(node)
    for field in dataclasses.fields(node):
        setattr(changed, field.name, _replace_named(field.name, getattr(node, field.name), replaced))
    return changed


def _replace_named(name: object, node: Any, replaced: list[str]) -> Any:
    return (_core if name == "core_attention" else _replace)(node, replaced)


def _core(core: Any, replaced: list[str]) -> Any:
    if core is None:
        return None
    module = core.module if isinstance(core, ModuleSpec) else core
    name = module[-1] if isinstance(module, tuple) else getattr(module, "__name__", repr(module))
    if name not in (*_REPLACED, DashAttention.__name__):
        raise ValueError(f"the spec's core_attention must be one of {', '.join(_REPLACED)}, got {name}")
    replaced.append(name)
    if not isinstance(core, ModuleSpec):
        return DashAttention
    return ModuleSpec(module=DashAttention, params=core.params, metainfo=core.metainfo)
