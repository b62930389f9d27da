"""The fixed-point grid of order-free accumulation, as csrc/config/fixed_point.h and the kernels have it: docs/order_free.md.

dQ of a row is a sum of partials, one for each KV tile. Each is rounded to a multiple of 2^-e, with e from a bound of the
row that the inputs give, and the integers are added: in any order, the sum is the same.
"""

from typing import NamedTuple

import torch

WINDOW = 8
MAX_SCORE = 2048.0
MAX_KEYS = 2**20
MAX_ERROR = 1e-4
SMALLEST_PRODUCT = 1e-30
CAPACITY = 1.5 * 2**30
MIN_EXPONENT, MAX_EXPONENT = -96, 126
MEAN_MAGNITUDE_TO_DEVIATION = 1.2533
NORM_SLACK = 1 + 2.0**-10


class Grid(NamedTuple):
    """Of tensors (batch * kv_heads, group, seqlen, head_dim)."""

    exponents: torch.Tensor
    """(batch * kv_heads, group, seqlen_q): e, int64."""
    needs_order: torch.Tensor
    """(batch * kv_heads): whether dQ of the group is summed in fp32 in the order of the schedule instead."""


def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.double().norm(dim=-1) * NORM_SLACK


def _mean_of_windows(pairs: torch.Tensor) -> torch.Tensor:
    """(heads, seqlen // 2) -> (heads, windows): means over the pairs of each window, of which the last may have fewer."""
    full = pairs.shape[1] // (WINDOW // 2) * (WINDOW // 2)
    means = [pairs[:, :full].unflatten(1, (-1, WINDOW // 2)).mean(dim=2)]
    if full < pairs.shape[1]:
        means.append(pairs[:, full:].mean(dim=1, keepdim=True))
    return torch.cat(means, dim=1)


def min_step_product(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """How much neighbouring rows differ where they do so least: `min_step_product` of csrc/config/fixed_point.h.

    Args:
        k, v: (batch * kv_heads, seqlen_k, head_dim).

    Returns:
        (batch * kv_heads), float64; inf where there is only one key.
    """
    end = k.shape[1] // 2 * 2
    if end == 0:
        return k.new_full(k.shape[:1], torch.inf, dtype=torch.float64)
    k_steps, v_steps = (x[:, 0:end:2].double() - x[:, 1:end:2].double() for x in (k, v))
    key_steps = _mean_of_windows(k_steps.abs().sum(dim=-1))
    return (key_steps * _mean_of_windows(v_steps.norm(dim=-1))).amin(dim=1)


def grid(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    d: torch.Tensor,
    *,
    softmax_scale: float,
    kv_tiles: int,
    dtype: torch.dtype,
) -> Grid:
    """The grid of each row, and the heads that cannot use it.

    Args:
        q, dout: (batch * kv_heads, group, seqlen_q, head_dim).
        k, v: (batch * kv_heads, seqlen_k, head_dim).
        d: (batch * kv_heads, group, seqlen_q, 1), rowsum(dout * out).
        softmax_scale: c; its sign does not matter.
        kv_tiles: partials of a row.
        dtype: of the inputs; the bound allows for its subnormal numbers.
    """
    seqlen_k, head_dim = k.shape[1:]
    key_norms, value_norms = _norms(k), _norms(v)
    elements = k.double().abs().amax(dim=-1)
    max_product = (value_norms * elements).amax(dim=-1)
    max_score = abs(softmax_scale) * _norms(q).flatten(1).amax(dim=-1) * key_norms.amax(dim=-1)
    # Per element of dQ and unit of |dout|: what rounding leaves, and what the differences of rows let expect.
    noise = 2 * max_product / CAPACITY * (kv_tiles / 12) ** 0.5
    steps = min_step_product(k, v) / head_dim**1.5
    expected = steps / 2 * MEAN_MAGNITUDE_TO_DEVIATION / seqlen_k**0.5
    fits = (max_score <= MAX_SCORE) & (noise <= MAX_ERROR * expected) & expected.isfinite()
    fits &= (max_product >= SMALLEST_PRODUCT) & (seqlen_k <= MAX_KEYS)

    subnormal_error = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    of_d = d.squeeze(-1).double().abs() + (seqlen_k + 2) * subnormal_error
    bound = _norms(dout) * max_product[:, None, None] + of_d * elements.amax(-1)[:, None, None]
    finite = bound.isfinite()
    _, exponents = torch.frexp(CAPACITY / bound)
    exponents = exponents.long().sub_(1).masked_fill_((bound == 0) | ~finite, 0)
    in_range = finite & (exponents >= MIN_EXPONENT)
    return Grid(exponents.clamp_(MIN_EXPONENT, MAX_EXPONENT), ~fits | ~in_range.flatten(1).all(dim=1))


class Accumulator:
    """Sums of dQ's partials on a grid: integers that wrap at 32 bits, as the hardware adds them."""

    def __init__(self, grid: Grid, dq: torch.Tensor):
        self._grid = grid
        self._dq = dq
        self._units = torch.zeros(dq.shape, dtype=torch.int64, device=dq.device)
        self._bad_rows = torch.zeros(dq.shape[:-1], dtype=torch.bool, device=dq.device)

    def add(self, head: int, rows: slice, partial: torch.Tensor) -> None:
        """Adds fp32 `partial`, (batch * kv_heads, rows, head_dim), to the rows of query head `head` of every group."""
        exponents = self._grid.exponents[:, head, rows, None]
        bad = ~partial.isfinite().all(dim=-1)
        self._bad_rows[:, head, rows] |= bad
        units = torch.ldexp(partial.masked_fill(bad[..., None], 0.0), exponents).round_()
        self._units[:, head, rows] += units.long()
        in_order = self._grid.needs_order[:, None, None]
        self._dq[:, head, rows] += torch.where(in_order, partial, 0.0)

    def result(self) -> torch.Tensor:
        wrapped = (self._units + 2**31) % 2**32 - 2**31
        sums = torch.ldexp(wrapped.float(), -self._grid.exponents[..., None])
        sums.masked_fill_(self._bad_rows[..., None], torch.nan)
        return torch.where(self._grid.needs_order[:, None, None, None], self._dq, sums)
