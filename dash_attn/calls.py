"""The path of every call from the public functions to the differentiable ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, dtensors, packs, transforms
from .dropout import DropoutBits
from .dropout import calls as dropout_calls

_NONE = (None,) * 9  # the defaults of `others` below
_ANY_WINDOW = (-1, -1)
_NO_WINDOW = (-1, -1, 0)  # left, right, attention_chunk


def attention(
    op: Callable[..., Any],
    named: dict[str, Tensor],
    split: tuple[int | None, ...],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    learnable_sink: Tensor | None,
    s_aux: Tensor | None,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
    num_splits: int,
    pack_gqa: bool | None,
    sm_margin: int,
    schedule: str,
    dropout_bits: DropoutBits | None,
    startend_row_indices: Tensor | None,
    return_max_logits: bool,
    pack: dict[str, Tensor | None] | None = None,
    max_seqlens: dict[str, int | Tensor] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Calls `op`, which checks the tensors, with arguments of the types that it takes.

    Every call takes this path: arguments at their defaults, or of the right type already, are not looked at again.
    """
    scores = (softcap, alibi_slopes, learnable_sink, s_aux)
    dropout = (dropout_p, dropout_bits)
    unsupported = (qv, q_descale, k_descale, v_descale, num_splits, pack_gqa)
    of_scores: dict[str, object] = {}
    of_dropout: dict[str, object] = {}
    others = (alibi_slopes, learnable_sink, s_aux, dropout_bits, qv, q_descale, k_descale, v_descale, pack_gqa)
    has_defaults = type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0.0
    has_defaults = has_defaults and type(num_splits) is int and num_splits == 1
    is_seldom = not has_defaults or any(map(operator.is_not, others, _NONE))
    if is_seldom:
        checks.reject_unsupported(*unsupported)
        of_scores = checks.as_scores(*scores)
    checks.check_tensors(named)
    probability = 0.0
    if is_seldom:
        probability = dropout_calls.checked_probability(*dropout, softmax_scale=softmax_scale, is_pack=pack is not None)
    of_columns: dict[str, Tensor] = {}
    if startend_row_indices is not None:
        of_columns = {"startend_row_indices": startend_row_indices}
        checks.check_tensors(of_columns)
        checks.reject_dropout(probability, "startend_row_indices is given")
    if pack is not None and max_seqlens is not None:
        checks.check_tensors({name: x for name, x in pack.items() if x is not None or name.startswith("cu_seqlens")})
        for name, value in max_seqlens.items():
            if type(value) is not int or torch.compiler.is_compiling() or value < 0:
                checks.check_max_seqlen(name, value)
    if type(causal) is not bool:
        causal = checks.as_flag("causal", causal)
    if deterministic is not False and deterministic is not None:
        checks.as_flag("deterministic", deterministic)
    if type(return_attn_probs) is not bool:
        return_attn_probs = checks.as_flag("return_attn_probs", return_attn_probs)
    if return_max_logits is not False and checks.as_flag("return_max_logits", return_max_logits):
        op = _with_max_logits(named)
    else:
        return_max_logits = False
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = checks.as_number("softmax_scale", softmax_scale)
    if type(sm_margin) is not int or sm_margin:
        sm_margin = checks.as_sm_margin(sm_margin)
    if type(schedule) is not str or schedule not in checks.SCHEDULES:
        checks.check_schedule(schedule)
    extra: tuple[object, ...] = ()
    # Only the type of arrays and tensors is looked at here, because they have no truth value.
    is_usual = type(window_size) is tuple and type(attention_chunk) is int
    if not is_usual or window_size != _ANY_WINDOW or attention_chunk:
        extra = (*checks.as_window(window_size), checks.as_attention_chunk(attention_chunk))
    if pack is not None:
        extra = (*(extra or _NO_WINDOW), *pack.values())
        if checks.CHECKS_VALUES:
            packs.check_lengths(named, pack)
    num_heads_q = split[0] if split else None
    if dtensors.are_among(named.values(), of_scores.values(), pack.values() if pack else (), of_columns.values()):
        checks.reject_given("DTensors are not supported with it", **of_columns)
        checks.reject_flag("return_max_logits", return_max_logits, "DTensors are not supported with it")
        op = dtensors.on_local_parts(op, named, pack, num_heads_q, of_scores, probability)
    if probability:  # last, as it may draw random numbers
        left, right, chunk = extra[:3] or _NO_WINDOW
        of_dropout = dropout_calls.keywords(
            probability, dropout_bits, named, num_heads_q, mask=(causal, left, right, chunk), pack=pack,
            max_seqlens=max_seqlens, return_attn_probs=return_attn_probs,
        )  # fmt: skip
    settings = (softmax_scale, causal, schedule, sm_margin, *extra)
    if transforms.is_active():
        checks.reject_flag("return_max_logits", return_max_logits, "transforms of torch.func are not supported with it")
        op = transforms.transformed(op)
    out, softmax_lse, *max_logits = op(*named.values(), *split, *settings, **of_scores, **of_dropout, **of_columns)
    if not return_attn_probs:
        return (out, *max_logits) if max_logits else out
    if not of_dropout:
        return out, softmax_lse, out.new_empty(0), *max_logits
    left, right, chunk = extra[:3] or _NO_WINDOW
    mask = {"causal": causal, "window": (left, right), "attention_chunk": chunk}
    changed = {"softmax_scale": softmax_scale, "softcap": of_scores["softcap"], "alibi_slopes": alibi_slopes}
    signed = dropout_calls.signed_probabilities(named, num_heads_q, softmax_lse, pack, of_dropout, changed, **mask)
    return out, softmax_lse, signed, *max_logits


def _with_max_logits(named: dict[str, Tensor]) -> Callable[..., Any]:
    """Returns the op that also finds the largest logits, for tensors of these names."""
    ops = torch.ops.dash_attn
    if "qkv" in named:
        return ops.attention_qkvpacked_and_max_logits.default
    return (ops.attention_kvpacked_and_max_logits if "kv" in named else ops.attention_and_max_logits).default
