"""Dropout in the public functions: checks its arguments, and computes the probabilities that they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import checks, packs, reference
from . import layout
from .bits import DropoutBits, DropoutState, as_probability

# FlashAttention-2 rounds the rows and columns that return_attn_probs returns up to a multiple of this.
_PROBABILITY_MULTIPLE = 128


def checked_probability(dropout_p: object, dropout_bits: object, *, softmax_scale: object, is_pack: bool) -> float:
    """Returns dropout_p as a number, 0 without dropout. Draws no random numbers.

    Args:
        dropout_p, dropout_bits: as in `flash_attn_func`.
        softmax_scale, is_pack: only for errors, to recognize calls with FlashAttention-3's order of arguments.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: dropout_p is out of range, or the bits were generated for another probability.
    """
    order = f"FlashAttention-3 has {'seqused_q' if is_pack else 'softmax_scale'} in this position: pass it by name"
    if isinstance(dropout_p, Tensor) or (isinstance(softmax_scale, bool) and dropout_p):
        got = f"{checks.describe(dropout_p)} and softmax_scale={checks.describe(softmax_scale)}"
        raise TypeError(f"dropout_p must be a number from 0 to below 1 ({order}), got {got}")
    p = 0.0 if dropout_p is None else as_probability("dropout_p", dropout_p)
    if dropout_bits is not None and not isinstance(dropout_bits, DropoutBits):
        kind = type(dropout_bits).__name__
        raise TypeError(f"dropout_bits must be a dash_attn.dropout.DropoutBits or None, got {kind}")
    if dropout_bits is not None and dropout_bits.p != p:
        raise ValueError(f"dropout_bits must be made for dropout_p={p}, got bits for p={dropout_bits.p}")
    return p


def keywords(
    p: float,
    dropout_bits: DropoutBits | None,
    named: Mapping[str, Tensor],
    num_heads_q: int | None,
    *,
    mask: tuple[bool, Any, Any, Any],
    pack: Mapping[str, Tensor | None] | None,
    max_seqlens: Mapping[str, int | Tensor] | None,
    return_attn_probs: bool,
) -> dict[str, object]:
    """Returns the dropout arguments of the ops; none if p is 0. Draws a state if the call has no bits.

    Bits that are not to be kept are accompanied by their state, from which the backward generates them again.

    Args:
        p: the result of `checked_probability`.
        dropout_bits: as in `flash_attn_func`.
        named, num_heads_q: as in `signed_probabilities`.
        mask: causal, the sides of the window, and attention_chunk.
        pack: the offsets and lengths of a variable-length batch, or None.
        max_seqlens: the most rows of a sequence of a variable-length batch, by the names of the arguments.
        return_attn_probs: whether the call returns `signed_probabilities`.

    Raises:
        ValueError: the bits were generated for another mask, or for other lengths with a mask; with DASH_ATTN_CHECK=1,
            also if a sequence is longer than max_seqlens.
        RuntimeError: during CUDA graph capture, the call would have to read lengths: for the signed probabilities of a
            variable-length batch, or for a length of max_seqlens that is a tensor.
    """
    if p == 0:
        return {}
    any_tensor = next(iter(named.values()))
    is_pack = pack is not None
    if return_attn_probs and is_pack and any_tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "return_attn_probs must be False during CUDA graph capture with dropout in a variable-length batch, "
            "because the call reads the lengths, got True"
        )
    given: dict[str, object] = {"dropout_p": p}
    if dropout_bits is not None:
        # The op reports tensors of a wrong rank.
        if not dropout_bits.is_of_every_pair and (is_pack or all(x.dim() >= 4 for x in named.values())):
            _check_mask_of_bits(dropout_bits, named, num_heads_q, mask, is_pack=is_pack)
        given["dropout_bits"] = dropout_bits.bits
        if dropout_bits.keep_bits:
            return given
        # The forward refuses a sequence that is longer than these lengths.
        rows, columns = (layout.BLOCK_ROWS * blocks for blocks in dropout_bits.bits.shape[2:4])
        of_side = {"max_seqlen_q": rows, "max_seqlen_k": columns, "max_seqlen": max(rows, columns)}
        max_seqlens = {name: of_side[name] for name in max_seqlens or {}}
    if pack is not None and max_seqlens:
        lengths = _lengths(max_seqlens, most=max(x.shape[0] for x in named.values()))
        if checks.CHECKS_VALUES:
            packs.check_lengths(named, pack, lengths)
        given |= lengths
    state = DropoutState.draw(any_tensor.device) if dropout_bits is None else dropout_bits.state
    return {**given, "rng_state": state.rng_state}


def _lengths(max_seqlens: Mapping[str, int | Tensor], most: int) -> dict[str, Any]:
    """Returns the lengths as ints. A tensor is read, once if both sides have the same; a meta tensor gives `most`."""
    lengths: dict[str, Any] = {}
    read: list[tuple[Tensor, Any]] = []
    for name, length in max_seqlens.items():
        if isinstance(length, Tensor):
            number = next((number for tensor, number in read if tensor is length), None)
            if number is None:
                if length.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"{name} must be an int during CUDA graph capture with dropout_p above 0, because the call "
                        f"reads it, got {checks.describe(length)}"
                    )
                number = most if length.is_meta else length.item()
                read.append((length, number))
            lengths[name] = number
        else:
            lengths[name] = checks.as_int(name, length, "an int")
    return lengths


def _check_mask_of_bits(
    bits: DropoutBits,
    named: Mapping[str, Tensor],
    num_heads_q: int | None,
    mask: tuple[bool, int, int, int],
    *,
    is_pack: bool,
) -> None:
    """Raises a ValueError if the call sees a pair whose bit was left out."""

    def described(mask: tuple[bool, int, int, int]) -> str:
        causal, left, right, chunk = mask
        return f"causal={causal}, window_size={(left, right)}, attention_chunk={chunk}"

    own = (bits.causal, *bits.window_size, bits.attention_chunk)
    (*own_sides, own_chunk), (*sides, chunk) = (
        (left, 0 if causal else right, chunk) for causal, left, right, chunk in (own, mask)
    )
    is_within = all(of_bits == -1 or 0 <= of_call <= of_bits for of_bits, of_call in zip(own_sides, sides))
    if not is_within or (own_chunk and (not chunk or own_chunk % chunk)):
        raise ValueError(
            f"dropout_bits must be made for a mask no narrower than the call's, {described(mask)}, got bits for "
            f"{described(own)}"
        )
    if is_pack:
        raise ValueError(
            f"dropout_bits must be made without a mask for a variable-length batch, got bits for {described(own)}"
        )
    lengths = tuple(x.shape[1] for x in _queries_and_keys(named, num_heads_q))
    if lengths != (bits.seqlen_q, bits.seqlen_k):
        raise ValueError(
            f"dropout_bits made for a mask must have the call's {lengths[0]} queries and {lengths[1]} keys, "
            f"got bits for {bits.seqlen_q} and {bits.seqlen_k}"
        )


def signed_probabilities(
    named: Mapping[str, Tensor],
    num_heads_q: int | None,
    softmax_lse: Tensor,
    pack: Mapping[str, Tensor | None] | None,
    dropout: Mapping[str, Any],
    scores: Mapping[str, Any],
    **mask: Any,
) -> Tensor:
    """Computes what FlashAttention-2 calls S_dmask: (batch, heads, seqlen_q, seqlen_k) like q, lengths rounded up to
    128.

    The result is P, negative where dropout drops an element, and 0 where a query does not see the key. For a
    variable-length batch the lengths are those of its longest sequence, which the call reads from the GPU. On a meta
    device, where these are unknown, the shape is (0,).

    Args:
        named: q and k, q and kv, or qkv, as the public functions take them.
        num_heads_q: the number of query heads in a qkv with all heads in one dimension.
        softmax_lse: the log-sum-exp of the call.
        pack: the offsets and lengths of a variable-length batch, or None.
        dropout: the result of `keywords`.
        scores: softmax_scale (or None), softcap and alibi_slopes.
        mask: as in `dash_attn.reference.forward`.
    """
    q, k = (x.detach() for x in _queries_and_keys(named, num_heads_q))
    if q.device.type == "meta":
        if pack is not None:
            return q.new_empty(0)
        return q.new_empty(q.shape[0], q.shape[2], *(_rounded_up(x.shape[1]) for x in (q, k)))
    scale = scores["softmax_scale"]
    scores = {**scores, "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale}
    slopes = scores.pop("alibi_slopes")
    # In a packed qkv, the lengths apply to queries and keys alike.
    of_pack = {} if pack is None else dict(pack)
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = (
        of_pack.get(name + side, of_pack.get(name)) for name in ("cu_seqlens", "seqused") for side in ("_q", "_k")
    )
    sequences = packs.sequences(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, [q], [k], [softmax_lse.detach()], slopes
    )
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    heads = q.shape[-2]
    p, bits = dropout["dropout_p"], dropout.get("dropout_bits")
    if bits is None:  # for all sequences in one call, because the kernel numbers them from the first
        longest_q = max((x.of_queries[0].shape[1] for x in sequences), default=0)
        longest_k = max((x.of_keys[0].shape[1] for x in sequences), default=0)
        bits = layout.of_call(dropout["rng_state"], p, batch, heads, longest_q, longest_k)
    kept = layout.Kept(bits, None, p)
    parts = []
    for (q_rows,), (k_rows,), (lse,), of_sequence, number in sequences:
        keep = kept.of(number, heads, q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        own = {**scores, "alibi_slopes": of_sequence, "keep": keep, **mask}
        parts.append((number, reference.signed_probabilities(q_rows, k_rows, lse, **own)))
    sizes = [max((part.shape[dim] for _, part in parts), default=0) for dim in (2, 3)]
    whole = q.new_zeros(batch, heads, *map(_rounded_up, sizes))
    for number, part in parts:
        target = whole if number is None else whole[number : number + 1]
        target[:, :, : part.shape[2], : part.shape[3]] = part
    return whole


def _rounded_up(length: int) -> int:
    return -(-length // _PROBABILITY_MULTIPLE) * _PROBABILITY_MULTIPLE


def _queries_and_keys(named: Mapping[str, Tensor], num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    if "k" in named:
        return named["q"], named["k"]
    if "kv" in named:
        return named["q"], named["kv"].select(-3, 0)
    qkv = named["qkv"]
    if num_heads_q is None:
        return qkv.select(-3, 0), qkv.select(-3, 1)
    kv_heads = (qkv.shape[-2] - num_heads_q) // 2
    return qkv.narrow(-2, 0, num_heads_q), qkv.narrow(-2, num_heads_q, kv_heads)
