"""Dropout as the public functions are asked for it, and what they give back of it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import checks, packs, reference
from . import layout
from .bits import DropoutBits, DropoutState, as_probability
from .bits import dropout_bits as make_bits

# To which FlashAttention-2 rounds up the rows and columns of what return_attn_probs gives.
_PROBABILITY_MULTIPLE = 128


def checked_probability(dropout_p: object, dropout_bits: object, *, softmax_scale: object, is_pack: bool) -> float:
    """dropout_p as a number, 0 without dropout. Nothing is drawn.

    Args:
        dropout_p, dropout_bits: as in `flash_attn_func`.
        softmax_scale, is_pack: for errors; they tell a call with FlashAttention-3's order of arguments.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value, or the bits are of another probability.
    """
    order = f"FlashAttention-3 has {'seqused_q' if is_pack else 'softmax_scale'} in this place: pass it by name"
    if isinstance(dropout_p, Tensor) or (isinstance(softmax_scale, bool) and dropout_p):
        got = f"{checks.describe(dropout_p)} and softmax_scale={checks.describe(softmax_scale)}"
        raise TypeError(f"dropout_p must be a number from 0 to below 1 ({order}), got {got}")
    p = 0.0 if dropout_p is None else as_probability("dropout_p", dropout_p)
    if dropout_bits is not None and not isinstance(dropout_bits, DropoutBits):
        kind = type(dropout_bits).__name__
        raise TypeError(f"dropout_bits must be a dash_attn.dropout.DropoutBits or None, got {kind}")
    if dropout_bits is not None and dropout_bits.p != p:
        raise ValueError(f"dropout_bits must be of dropout_p={p}, got bits of p={dropout_bits.p}")
    return p


def keywords(
    p: float,
    dropout_bits: DropoutBits | None,
    named: Mapping[str, Tensor],
    num_heads_q: int | None,
    *,
    pack: Mapping[str, Tensor | None] | None,
    max_seqlens: Mapping[str, int | Tensor] | None,
    sm_margin: int,
) -> dict[str, object]:
    """Those of the ops, none where p is 0. A state is drawn where there are no bits, and of a pack on a GPU, whose
    longest sequence the op does not know, bits are made of it here.

    Args:
        p: from `checked_probability`.
        dropout_bits: as in `flash_attn_func`.
        named, num_heads_q, pack: as in `signed_probabilities`.
        max_seqlens: of a pack, the longest sequence, or the most queries and keys that one has.
        sm_margin: SMs that the kernel which makes bits leaves to others.

    Raises:
        TypeError: a length of max_seqlens is needed and no int.
    """
    if p == 0:
        return {}
    if dropout_bits is not None:
        return {"dropout_bits": dropout_bits.bits, "dropout_p": p}
    first = next(iter(named.values()))
    # Of wrong ranks the op says what is wrong.
    has_ranks = pack is not None and all(x.dim() >= 3 for x in named.values())
    if pack is None or first.device.type != "cuda" or not has_ranks:
        return {"rng_state": DropoutState.draw(first.device).rng_state, "dropout_p": p}
    longest = []
    lengths: Mapping[str, object] = max_seqlens or {"max_seqlen_q": None}
    for name, length in lengths.items():
        # Nobody reads a tensor: that would wait for the GPU.
        if isinstance(length, (bool, Tensor)) or not hasattr(length, "__index__"):
            raise TypeError(f"{name} must be an int with dropout on a GPU, got {checks.describe(length)}")
        longest.append(operator.index(length))
    cu_seqlens = next(iter(pack.values()))
    assert cu_seqlens is not None
    q, k = _queries_and_keys(named, num_heads_q)
    # No block too many, and one at least where there are rows.
    seqlen_q, seqlen_k = (min(max(most, 1), x.shape[0]) for most, x in ((longest[0], q), (longest[-1], k)))
    batch = max(cu_seqlens.numel() - 1, 0)
    bits = make_bits(
        DropoutState.draw(first.device), p=p, batch=batch, heads=q.shape[-2], seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        sm_margin=sm_margin,
    )  # fmt: skip
    return {"dropout_bits": bits.bits, "dropout_p": p}


def signed_probabilities(
    named: Mapping[str, Tensor],
    num_heads_q: int | None,
    softmax_lse: Tensor,
    pack: Mapping[str, Tensor | None] | None,
    dropout: Mapping[str, Any],
    scores: Mapping[str, Any],
    **mask: Any,
) -> Tensor:
    """What FlashAttention-2 calls S_dmask: (batch, heads, seqlen_q, seqlen_k) like q, lengths rounded up to 128.

    P with the sign that says what dropout did, below 0 is dropped; 0 where no key is seen. Of a pack the lengths are
    those of its longest sequence.

    Args:
        named: q and k, q and kv, or qkv, as the public functions take them.
        num_heads_q: of a qkv with all heads in one dimension.
        softmax_lse: the call's.
        pack: None, or its tensors.
        dropout: from `keywords`.
        scores: softmax_scale (or None), softcap and alibi_slopes.
        mask: as `dash_attn.reference.forward` takes it.
    """
    q, k = (x.detach() for x in _queries_and_keys(named, num_heads_q))
    scale = scores["softmax_scale"]
    scores = {**scores, "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale}
    slopes = scores.pop("alibi_slopes")
    kept = layout.Kept(dropout.get("dropout_bits"), dropout.get("rng_state"), dropout["dropout_p"])
    # Of a qkv the lengths are those of queries and keys alike.
    of_pack = {} if pack is None else dict(pack)
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = (
        of_pack.get(name + side, of_pack.get(name)) for name in ("cu_seqlens", "seqused") for side in ("_q", "_k")
    )
    sequences = packs.sequences(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, [q], [k], [softmax_lse.detach()], slopes
    )
    heads = q.shape[-2]
    parts = []
    for (q_rows,), (k_rows,), (lse,), of_sequence, number in sequences:
        keep = kept.of(number, heads, q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        own = {**scores, "alibi_slopes": of_sequence, "keep": keep, **mask}
        parts.append((number, reference.signed_probabilities(q_rows, k_rows, lse, **own)))
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    sizes = [max((part.shape[dim] for _, part in parts), default=0) for dim in (2, 3)]
    rows, columns = (-(-size // _PROBABILITY_MULTIPLE) * _PROBABILITY_MULTIPLE for size in sizes)
    whole = q.new_zeros(batch, heads, rows, columns)
    for number, part in parts:
        target = whole if number is None else whole[number : number + 1]
        target[:, :, : part.shape[2], : part.shape[3]] = part
    return whole


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
