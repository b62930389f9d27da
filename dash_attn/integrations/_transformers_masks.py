"""Four-dimensional attention masks of transformers as masks by key columns (`dash_attn.masks`).

transformers passes a 4D attention mask to the attention function without changes, and its own function for flash
attention takes padding masks only. `register` puts a function in its place that takes both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import flash_attn_func, masks

# Numbers of a mask that is added to the scores: this, or less, hides a key.
_HIDDEN = -1e4
# Every layer of a model gets the same tensor. By mask: its version, and what it was converted into.
_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register(name: str) -> None:
    """Makes transformers call `attention` for the implementation `name`, which must be loaded."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            return _of_all_pairs(module, query, key, value, attention_mask, **kwargs)
        result = flash_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if not torch.compiler.is_compiling() and ALL_ATTENTION_FUNCTIONS.get(name) is not attention:
            # After another implementation has been used, transformers loads this one again and registers its own.
            ALL_ATTENTION_FUNCTIONS.register(name, attention)
        return result

    ALL_ATTENTION_FUNCTIONS.register(name, attention)


def _of_all_pairs(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention under a mask that replaces the model's own, windows included, as eager attention does.

    Args:
        query, key, value: (batch, heads, seqlen, head_dim).
        attention_mask: (batch or 1, 1 or kv_heads, seqlen_q, seqlen_k), bool with True for keys that a query sees, or a
            number that is added to the scores, 0 or at most -10000.

    Raises:
        TypeError, ValueError: the mask has another type or other numbers, or hides more than two runs of queries from a
            key.
    """
    from transformers.integrations.flash_attention import get_target_dtype

    dtype = get_target_dtype(query, module)
    q, k, v = (x.transpose(1, 2) if dtype is None else x.transpose(1, 2).to(dtype) for x in (query, key, value))
    columns, causal = _as_columns(attention_mask)
    out = flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=causal,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        startend_row_indices=columns.expand(query.shape[0], -1, -1, -1),
    )
    return out, None


@torch.compiler.disable
def _as_columns(mask: Tensor) -> masks.ColumnMask:
    """Converts a mask once for all layers that get it. Waits for the GPU."""
    version = None if mask.is_inference() else mask._version  # changes of an inference tensor are not counted
    known = _converted.get(mask)
    if known is not None and version is not None and known[0] == version:
        return known[1]
    if mask.is_floating_point():
        if not ((mask == 0) | (mask <= _HIDDEN)).all():
            raise ValueError(
                f"attention_mask must hold 0 and numbers of at most {_HIDDEN:.0f} only, because other numbers would "
                "change scores, got others"
            )
        visible = mask == 0
    elif mask.dtype == torch.bool:
        visible = mask
    else:
        raise TypeError(f"attention_mask must be of dtype bool or floating-point, got {mask.dtype}")
    converted = masks.from_dense_mask(visible)
    _converted[mask] = version, converted
    return converted
