"""The fixed-point scales of order-free accumulation, as in csrc/contract/fixed_point.h and the kernels.

dQ of a row is a sum of partials, one per KV tile. Each partial is rounded to a multiple of 2^-e, where e follows from a
bound of the row that the inputs determine. The integers are then added, and their sum is the same in any order. See
docs/order_free.md.
"""

from typing import NamedTuple

import torch

WINDOW = 8
MAX_LSE = 4096.0
MAX_KEYS = 2**20
MAX_ERROR = 1e-4
SMALLEST_PRODUCT = 1e-30
CAPACITY = 1.5 * 2**30
MIN_EXPONENT, MAX_EXPONENT = -96, 126
MEAN_MAGNITUDE_TO_DEVIATION = 1.2533
NORM_SLACK = 1 + 2.0**-10


class Scales(NamedTuple):
    """The scales of the rows of dQ, (batch * kv_heads, group, seqlen_q, head_dim)."""

    exponents: torch.Tensor
    """(batch * kv_heads, group, seqlen_q): e, int64."""
    needs_order: torch.Tensor
    """(batch * kv_heads): whether dQ of the group is summed in fp32 in the order of the schedule instead."""


def _norms(x: torch.Tensor) -> torch.Tensor:
    """Computes upper bounds in fp32: from the largest elements alone, and up to inf, if squares exceed its range."""
    squares = x.double().square().sum(dim=-1)
    in_range = (squares >= 2.0**-100) & (squares <= 2.0**120)
    norms = torch.where(in_range, squares.sqrt(), x.double().abs().amax(dim=-1) * x.shape[-1] ** 0.5)
    return (norms * NORM_SLACK).float().double()


def _mean_of_windows(pairs: torch.Tensor) -> torch.Tensor:
    """(heads, seqlen // 2) -> (heads, windows): means over each window's pairs; the last window may have fewer."""
    full = pairs.shape[1] // (WINDOW // 2) * (WINDOW // 2)
    means = [pairs[:, :full].unflatten(1, (-1, WINDOW // 2)).mean(dim=2)]
    if full < pairs.shape[1]:
        means.append(pairs[:, full:].mean(dim=1, keepdim=True))
    return torch.cat(means, dim=1)


def min_step_product(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns the smallest difference between neighboring rows: `min_step_product` of csrc/contract/fixed_point.h.

    Args:
        k: (batch * kv_heads, seqlen_k, head_dim).
        v: (batch * kv_heads, seqlen_k, value_head_dim).

    Returns:
        float64 (batch * kv_heads); inf if there is only one key.
    """
    end = k.shape[1] // 2 * 2
    if end == 0:
        return k.new_full(k.shape[:1], torch.inf, dtype=torch.float64)
    k_steps, v_steps = (x[:, 0:end:2].double() - x[:, 1:end:2].double() for x in (k, v))
    key_steps = _mean_of_windows(k_steps.abs().sum(dim=-1))
    return (key_steps * _mean_of_windows(v_steps.norm(dim=-1))).amin(dim=1)


def row_scales(
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    d: torch.Tensor,
    lse: torch.Tensor,
    *,
    seen: torch.Tensor,
    tile_k: int,
    dtype: torch.dtype,
) -> Scales:
    """Returns the scale of each row, and the heads that cannot use their scales.

    Args:
        k: (batch * kv_heads, seqlen_k, head_dim).
        v: (batch * kv_heads, seqlen_k, value_head_dim).
        dout: (batch * kv_heads, group, seqlen_q, value_head_dim).
        d: (batch * kv_heads, group, seqlen_q, 1), rowsum(dout * out).
        lse: like d, natural logarithm; infinite if a query sees no key.
        seen: (seqlen_q, 2), where the keys that each query sees begin and end.
        tile_k: keys per KV tile, and so per partial.
        dtype: the dtype of the inputs; the bound allows for its subnormal numbers.
    """
    seqlen_k, head_dim = k.shape[1:]
    max_element = k.double().abs().amax(dim=(1, 2))
    max_product = (_norms(v) * k.double().abs().amax(dim=-1)).amax(dim=-1)
    steps = min_step_product(k, v)
    in_range = (max_product >= SMALLEST_PRODUCT) & max_product.isfinite() & steps.isfinite() & (seqlen_k <= MAX_KEYS)

    max_element, max_product, steps = (x[:, None, None] for x in (max_element, max_product, steps))
    dout_norms = _norms(dout)
    subnormal_error = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    bound = dout_norms * max_product + (d.squeeze(-1).double().abs() + (seqlen_k + 2) * subnormal_error) * max_element
    _, exponents = torch.frexp(CAPACITY / bound)
    exponents = exponents.long().sub_(1).masked_fill_(bound == 0, 0)
    has_scale = bound.isfinite() & (exponents >= MIN_EXPONENT)
    exponents.clamp_(MIN_EXPONENT, MAX_EXPONENT)

    # Per element of dQ: the rounding error, and the magnitude that dout and differences of neighboring rows suggest.
    first, end = seen.unbind(1)
    keys = end - first
    tiles = torch.where(keys > 0, (end + tile_k - 1) // tile_k - first // tile_k, 0)
    noise = (tiles / 12).double().sqrt() * torch.exp2(-exponents.double())
    expected = dout_norms * steps * (MEAN_MAGNITUDE_TO_DEVIATION / 2) / (head_dim * v.shape[-1] ** 0.5)
    expected = expected / keys.clamp(min=1).double().sqrt()
    fits = has_scale & ((noise <= MAX_ERROR * expected) | (dout_norms == 0))
    fits &= ~((lse.abs() > MAX_LSE) & lse.isfinite()).squeeze(-1)
    return Scales(exponents, ~(in_range & fits.flatten(1).all(dim=1)))


class Accumulator:
    """Sums of dQ's partials in fixed point: integers that wrap at 32 bits, as the hardware adds them."""

    def __init__(self, scales: Scales, dq: torch.Tensor):
        self._scales = scales
        self._dq = dq
        self._units = torch.zeros(dq.shape, dtype=torch.int64, device=dq.device)
        self._bad_rows = torch.zeros(dq.shape[:-1], dtype=torch.bool, device=dq.device)

    def add(self, head: int, rows: slice, partial: torch.Tensor) -> None:
        """Adds fp32 `partial`, (batch * kv_heads, rows, head_dim), to the rows of query head `head` of every group."""
        exponents = self._scales.exponents[:, head, rows, None]
        bad = ~partial.isfinite().all(dim=-1)
        self._bad_rows[:, head, rows] |= bad
        units = torch.ldexp(partial.masked_fill(bad[..., None], 0.0), exponents).round_()
        self._units[:, head, rows] += units.long()
        in_order = self._scales.needs_order[:, None, None]
        self._dq[:, head, rows] += torch.where(in_order, partial, 0.0)

    def result(self) -> torch.Tensor:
        wrapped = (self._units + 2**31) % 2**32 - 2**31
        sums = torch.ldexp(wrapped.float(), -self._scales.exponents[..., None])
        sums.masked_fill_(self._bad_rows[..., None], torch.nan)
        return torch.where(self._scales.needs_order[:, None, None, None], self._dq, sums)
