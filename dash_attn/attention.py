"""What the public functions do with their arguments: on the path of every call."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401: ops makes torch.ops.dash_attn

# In the order of `unsupported`.
_UNSUPPORTED_DEFAULTS = (0.0, 0.0, None, None, None, None, None, 1, None, None)
_ANY_WINDOW = (-1, -1)


def attention(
    op: torch._ops.OpOverload,
    named: dict[str, Tensor],
    split: tuple[int | None, ...],
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    attention_chunk: int,
    deterministic: bool,
    return_attn_probs: bool,
    sm_margin: int,
    schedule: str,
    unsupported: tuple,
    pack: dict[str, Tensor | None] | None = None,
    max_seqlens: dict[str, int | Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Calls `op`, which checks the tensors, on arguments of the types that it takes.

    What is at its default, or of the right type already, is not looked at again.
    """
    if any(map(operator.is_not, unsupported, _UNSUPPORTED_DEFAULTS)):
        checks.reject_unsupported(*unsupported, is_pack=pack is not None)
    checks.check_tensors(named)
    if pack is not None:
        checks.check_tensors({name: x for name, x in pack.items() if x is not None or name.startswith("cu_seqlens")})
        for name, value in max_seqlens.items():
            checks.check_max_seqlen(name, value)
    if type(causal) is not bool:
        causal = checks.as_flag("causal", causal)
    if deterministic is not False and deterministic is not None:
        checks.as_flag("deterministic", deterministic)
    if type(return_attn_probs) is not bool:
        return_attn_probs = checks.as_flag("return_attn_probs", return_attn_probs)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = checks.as_softmax_scale(softmax_scale)
    if type(sm_margin) is not int or sm_margin:
        sm_margin = checks.as_sm_margin(sm_margin)
    if type(schedule) is not str:
        checks.check_schedule_type(schedule)
    extra = ()
    if window_size != _ANY_WINDOW or attention_chunk != 0 or pack is not None:
        extra = (*checks.as_window(window_size), checks.as_attention_chunk(attention_chunk))
        if pack is not None:
            extra += tuple(pack.values())
    out, softmax_lse = op(*named.values(), *split, softmax_scale, causal, schedule, sm_margin, *extra)
    return (out, softmax_lse, out.new_empty(0)) if return_attn_probs else out
