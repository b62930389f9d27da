"""Masks by key columns: for each key, one or two intervals of query rows that do not see the key.

The tensors are FlashMask's (arXiv 2410.01359), the argument `startend_row_indices` of the attention functions: int32
(batch, 1 or kv_heads, seqlen_k, n), and (1 or kv_heads, total_k, n) for variable-length batches, in which rows count
from the first query of the key's own sequence. With the bounds s0, s1, ... of a key, the rows that do not see the key
are, in addition to those from which causal, window_size and attention_chunk hide it,

    causal=True,  n=1: rows >= s0                       causal=True,  n=2: s0 <= row < s1
    causal=False, n=2: rows >= s0, and rows < s1        causal=False, n=4: s0 <= row < s1, and s2 <= row < s3

`causal` is the argument of the call. An interval whose end is not above its start hides nothing, and bounds may lie
outside of the rows. docs/masks.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import checks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "ColumnMask",
    "document_mask",
    "from_block_mask",
    "from_dense_mask",
    "hidden_rows",
    "prefix_lm_mask",
    "prefix_tree_mask",
]

# Pairs of a query and a key that a conversion looks at together.
_PAIRS = 2**22


class ColumnMask(NamedTuple):
    """A mask as the two arguments of the attention functions."""

    startend_row_indices: Tensor
    causal: bool


def document_mask(ids: Tensor, *, causal: bool = True) -> Tensor:
    """Returns the mask under which a token sees the tokens of its own document only.

    The function does not wait for a GPU.

    Args:
        ids: an integer tensor (batch, seqlen): a run of equal numbers is a document.
        causal: the argument of the call: whether a token sees only itself and earlier tokens.

    Returns:
        int32 (batch, 1, seqlen, 1) with causal, and (batch, 1, seqlen, 2) without.

    Raises:
        TypeError, ValueError: ids is not such a tensor.
    """
    _check_integers("ids", ids, "(batch, seqlen)", 2)
    batch, seqlen = ids.shape
    tokens = torch.arange(seqlen, dtype=torch.int32, device=ids.device).expand(batch, seqlen)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = changes.new_ones(batch, min(seqlen, 1))
    first, last = torch.cat((edge, changes), dim=1), torch.cat((changes, edge), dim=1)
    ends = torch.where(last, tokens + 1, seqlen).flip(1).cummin(dim=1).values.flip(1)
    if causal:
        return ends[:, None, :, None]
    starts = torch.where(first, tokens, 0).cummax(dim=1).values
    return torch.stack((ends, starts), dim=-1)[:, None]


def prefix_lm_mask(lengths: Tensor, seqlen: int) -> Tensor:
    """Returns the mask under which tokens see all of a prefix, and after the prefix the earlier tokens.

    The mask is for a call with causal=False. The function does not wait for a GPU.

    Args:
        lengths: an integer tensor (batch,): the lengths of the prefixes. A length of seqlen or more means that the
            whole sequence is the prefix, and one of 0 or less that there is no prefix.
        seqlen: the number of queries and keys of each sequence.

    Returns:
        int32 (batch, 1, seqlen, 2).

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    _check_integers("lengths", lengths, "(batch,)", 1)
    tokens = torch.arange(_checked_seqlen(seqlen), dtype=torch.int32, device=lengths.device)
    # A key of the prefix is hidden from no row, and a later one from the rows before it.
    ends_of_head = torch.where(tokens < lengths[:, None], 0, tokens)
    return torch.stack((torch.full_like(ends_of_head, seqlen), ends_of_head), dim=-1)[:, None]


def prefix_tree_mask(
    parents: Tensor | Sequence[int], lengths: Tensor | Sequence[int], seqlen: int | None = None
) -> Tensor:
    """Returns the mask of sequences that share prefixes, stored once each: a tree whose nodes are runs of tokens.

    A token sees the tokens of the ancestors of its node and the earlier tokens of its own node. The nodes are in
    depth-first order, and the tokens of a node follow those of the previous node. The mask is for a call with
    causal=True. The function does not wait for a GPU if it is given `seqlen`. Its memory grows with the square of the
    number of nodes.

    Args:
        parents: integers, (nodes,) or (batch, nodes): the parent of each node, an earlier node of the same sequence, or
            -1 for a root. A sequence may have several roots, whose trees do not see each other.
        lengths: integers like parents, on the same device: the number of tokens of each node, at least 0. Roots of
            length 0 fill up sequences with fewer nodes.
        seqlen: the number of tokens of a sequence, padding included. Tokens after the last node see nothing, and no
            token sees them. Default: that of the longest sequence; reading it waits for the GPU.

    Returns:
        int32 (batch, 1, seqlen, 1), with a batch of 1 for (nodes,).

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape; the parents are not in depth-first order; a
            length is negative; or the nodes have more than seqlen tokens. On a GPU, such values cause a device-side
            error.
    """
    nodes, sizes = (torch.atleast_2d(torch.as_tensor(x)) for x in (parents, lengths))
    _check_integers("parents", nodes, "(nodes,) or (batch, nodes)", 2)
    _check_integers("lengths", sizes, "(nodes,) or (batch, nodes)", 2)
    if nodes.shape != sizes.shape or nodes.device != sizes.device:
        raise ValueError(
            f"lengths must have the shape and the device of parents, {tuple(nodes.shape)} and {nodes.device}, got "
            f"{tuple(sizes.shape)} and {sizes.device}"
        )
    count = nodes.shape[1]
    number = torch.arange(count, device=nodes.device)
    _check_each((nodes >= -1) & (nodes < number), "parents must be -1 or the number of an earlier node", nodes)
    # Depth first: all nodes between a parent and its child are descendants of the parent.
    between = (number > nodes[:, :, None]) & (number < number[:, None])
    in_order = ~(between & (nodes[:, None, :] < nodes[:, :, None])).any(dim=2)
    _check_each(in_order, "parents must be in depth-first order: the node before, one of its ancestors, or -1", nodes)
    _check_each(sizes >= 0, "lengths must be at least 0", sizes)
    # The first node behind a subtree is the first later one whose parent comes before the root of the subtree.
    is_behind = (number > number[:, None]) & (nodes[:, None, :] < number[:, None])
    behind = torch.where(is_behind, number, count).amin(dim=2) if count else nodes
    starts = torch.nn.functional.pad(sizes.cumsum(dim=1), (1, 0))  # and the end
    if seqlen is None:
        seqlen = int(starts[:, -1].max()) if starts.numel() else 0
    tokens = torch.arange(_checked_seqlen(seqlen), device=nodes.device).expand(nodes.shape[0], seqlen)
    fits = (starts[:, -1] <= seqlen).all()
    checks.check_values(fits, f"lengths must have a sum of at most seqlen, {seqlen}, in every sequence, got more")
    of_token = torch.searchsorted(starts[:, 1:].contiguous(), tokens.contiguous(), right=True)
    # The column behind the last node is that of padding, which is hidden from every row.
    ends = torch.nn.functional.pad(starts.gather(1, behind), (0, 1))
    return ends.gather(1, of_token).to(torch.int32)[:, None, :, None]


def from_dense_mask(visible: Tensor) -> ColumnMask:
    """Converts a dense mask into the same mask by key columns. The call waits for the GPU.

    Args:
        visible: bool (seqlen_q, seqlen_k) or (batch, 1 or kv_heads, seqlen_q, seqlen_k): which keys each query sees.

    Returns:
        The arguments of a call with the same mask: startend_row_indices, int32 (batch, 1 or kv_heads, seqlen_k, n) with
        a batch of 1 for a mask of two dimensions, and causal, which is True if no query sees a key after its own and
        one interval per key expresses the rest.

    Raises:
        TypeError, ValueError: visible is not such a tensor, or it hides three or more runs of queries from a key.
    """
    checks.check_tensors({"visible": visible})
    if visible.dtype != torch.bool:
        raise TypeError(f"visible must be torch.bool, got {visible.dtype}")
    if visible.dim() not in (2, 4):
        raise ValueError(
            "visible must have shape (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), got "
            f"{tuple(visible.shape)}"
        )
    pairs = visible if visible.dim() == 4 else visible[None, None]
    return _converted("visible", lambda first, end: pairs[..., first:end], pairs.shape, pairs.device)


def from_block_mask(block_mask: BlockMask) -> ColumnMask:
    """Converts a mask of FlexAttention into the same mask by key columns. The call waits for the GPU.

    The conversion is exact. It evaluates the mask_mod for all pairs of a query and a key, for some keys at a time, and
    takes blocks as FlexAttention does: mask_mod decides in partial blocks, and full blocks are visible as a whole.

    Args:
        block_mask: a torch.nn.attention.flex_attention.BlockMask, with 1 or kv_heads heads.

    Returns:
        As `from_dense_mask`, with the batch and the heads of the BlockMask.

    Raises:
        TypeError: block_mask is not a BlockMask.
        ValueError: it hides three or more runs of queries from a key.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {checks.describe(block_mask)}")
    seqlen_q, seqlen_k = block_mask.seq_lengths
    block_q, block_k = block_mask.BLOCK_SIZE
    device = block_mask.kv_indices.device
    partial = _dense_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, -(-seqlen_k // block_k))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _dense_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, partial.shape[-1])
    batch, heads = partial.shape[:2]
    rows = torch.arange(seqlen_q, device=device)[:, None] // block_q

    def visible(first: int, end: int) -> Tensor:
        def of_slice(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return block_mask.mask_mod(b, h, q, kv + first)

        columns = torch.arange(first, end, device=device) // block_k
        by_pair = create_mask(of_slice, batch, heads, seqlen_q, end - first, device=device)
        return full[..., rows, columns] | (partial[..., rows, columns] & by_pair)

    return _converted("block_mask", visible, (batch, heads, seqlen_q, seqlen_k), device)


def _dense_blocks(counts: Tensor, indices: Tensor | None, columns: int) -> Tensor:
    """Returns which blocks are in the lists, bool (batch, heads, rows, columns)."""
    assert indices is not None
    leading = (1,) * (4 - indices.dim()) + tuple(indices.shape)
    counts, indices = counts.reshape(leading[:-1]), indices.reshape(leading)
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    blocks = torch.zeros(*leading[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return blocks.scatter_(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _converted(
    name: str, visible: Callable[[int, int], Tensor], shape: Sequence[int], device: torch.device
) -> ColumnMask:
    """Converts the mask of which `visible` returns the pairs of a range of keys.

    The result is causal if no query sees a later key and each key has one hidden run among the queries from its own on.
    A key with at most two hidden runs in all has the other form: its runs are one more than those at most.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    step = max(1, _PAIRS // max(1, batch * heads * seqlen_q))
    own_keys = torch.arange(seqlen_q, device=device) + seqlen_k - seqlen_q
    all_runs, runs_from_own, sees_later_key = [], [], False
    for first in range(0, seqlen_k, step):
        end = min(first + step, seqlen_k)
        hidden = ~visible(first, end).mT
        is_later = torch.arange(first, end, device=device)[:, None] > own_keys
        sees_later_key = sees_later_key or bool((~hidden & is_later).any())
        all_runs.append(_runs(hidden))
        runs_from_own.append(_runs(hidden & ~is_later))
    if not all_runs:
        return ColumnMask(torch.zeros(batch, heads, 0, 2, dtype=torch.int32, device=device), False)
    start, end_, start_2, end_2, count = torch.cat(all_runs, dim=2).unbind(-1)
    if (count > 2).any():
        key, b, h = min((key, b, h) for b, h, key in (count > 2).nonzero().tolist())
        raise ValueError(
            f"{name} must hide at most two runs of queries from each key, got {int(count[b, h, key])} runs for key "
            f"{key} in sequence {b}, head {h}"
        )
    own_start, own_end, _, _, own_count = torch.cat(runs_from_own, dim=2).unbind(-1)
    if not sees_later_key and (own_count <= 1).all():
        is_tail = bool((own_end == seqlen_q).all())
        return ColumnMask(_bounds(own_start) if is_tail else _bounds(own_start, own_end), True)
    has_head, has_tail = start == 0, torch.where(count == 2, end_2, end_) == seqlen_q
    if ((count == 0) | ((count == 1) & (has_head | has_tail)) | (has_head & has_tail)).all():
        start_of_tail = torch.where(has_tail, torch.where(count == 2, start_2, start), seqlen_q)
        return ColumnMask(_bounds(start_of_tail, torch.where(has_head, end_, 0)), False)
    return ColumnMask(_bounds(start, end_, start_2, end_2), False)


def _runs(hidden: Tensor) -> Tensor:
    """Returns the first two runs of hidden queries, and the number of runs, of masks bool (..., seqlen_q).

    Returns:
        int32 (..., 5): start and end of the first run, of the second one, and the number. A run that does not exist
        starts and ends at seqlen_q.
    """
    seqlen_q = hidden.shape[-1]
    places = torch.arange(seqlen_q + 1, dtype=torch.int32, device=hidden.device)
    edge = hidden.new_zeros(*hidden.shape[:-1], 1)
    before, after = torch.cat((edge, hidden), dim=-1), torch.cat((hidden, edge), dim=-1)

    def first_two(marked: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(marked, places, seqlen_q).amin(dim=-1)
        return first, torch.where(marked & (places > first[..., None]), places, seqlen_q).amin(dim=-1)

    is_start = after & ~before
    (start, start_2), (end, end_2) = first_two(is_start), first_two(before & ~after)
    return torch.stack((start, end, start_2, end_2, is_start.sum(dim=-1, dtype=torch.int32)), dim=-1)


def _bounds(*bounds: Tensor) -> Tensor:
    return torch.stack(bounds, dim=-1).to(torch.int32)


def _check_integers(name: str, x: object, shape: str, rank: int) -> None:
    checks.check_tensors({name: x})
    assert isinstance(x, Tensor)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}")
    if x.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


def _check_each(holds: Tensor, message: str, of_nodes: Tensor) -> None:
    """Raises a ValueError for the first node of which `holds` is False; on a GPU an error of the device."""
    if not checks.reads_values(holds):
        torch._assert_async(holds.all(), message)
    elif not holds.all():
        sequence, node = (~holds).nonzero()[0].tolist()
        raise ValueError(f"{message}, got {int(of_nodes[sequence, node])} for node {node} of sequence {sequence}")


def _checked_seqlen(seqlen: object) -> int:
    number = checks.as_int("seqlen", seqlen, "an int of at least 0")
    if number < 0:
        raise ValueError(f"seqlen must be an int of at least 0, got {number}")
    return number


def hidden_rows(startend_row_indices: Tensor, first_row: int, end_row: int, *, causal: bool) -> Tensor:
    """Returns which of the query rows first_row, ..., end_row - 1 the tensor hides each key from.

    Args:
        startend_row_indices: int32 (..., keys, n), n as `causal` allows.
        first_row, end_row: the rows.
        causal: the argument of the call, which gives the bounds their meaning. What `causal` itself hides is not
            included.

    Returns:
        bool (..., end_row - first_row, keys).
    """
    rows = torch.arange(first_row, end_row, device=startend_row_indices.device)[:, None]
    bounds = [bound.unsqueeze(-2) for bound in startend_row_indices.unbind(-1)]
    if len(bounds) == 1:
        return rows >= bounds[0]
    if len(bounds) == 2:
        from_first, before_second = rows >= bounds[0], rows < bounds[1]
        return from_first & before_second if causal else from_first | before_second
    return ((rows >= bounds[0]) & (rows < bounds[1])) | ((rows >= bounds[2]) & (rows < bounds[3]))
