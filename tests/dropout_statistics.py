"""How far a statistic of ideal random bits may be from its mean, but for a chance that is given: no assumption of a
normal distribution, so that the bounds hold as they stand."""

import math

import torch

CHANCE = 1e-6
"""Of a test to fail on ideal random bits: of all its statistics together."""


def radius(variance: float, largest: float, chance: float) -> float:
    """r with P(|sum| >= r) <= chance, of a sum of independent terms, or of differences of a martingale, whose (summed,
    conditional) variance is at most `variance` and each of which is at most `largest` in magnitude.

    Bernstein's and Freedman's inequality: P(sum >= r) <= exp(-r^2 / (2 (variance + largest r / 3)))."""
    log = math.log(2 / chance)
    b = largest * log / 3
    return b + math.sqrt(b * b + 2 * variance * log)


def rate_errors(mask: torch.Tensor, rate: float, dims: tuple[int, ...], chance: float) -> float:
    """The largest deviation of the number kept, summed over `dims`, from its mean, in units of its radius."""
    counts = mask.double().sum(dim=dims)
    terms = mask.numel() / counts.numel()
    limit = radius(terms * rate * (1 - rate), 1.0, chance / counts.numel())
    return float((counts - terms * rate).abs().max() / limit)


def correlation_error(first: torch.Tensor, second: torch.Tensor, rate: float, chance: float) -> float:
    """Of two masks, or of one and the same shifted: the sum of products of their deviations from the rate, in units of
    its radius. The terms are a martingale's differences: given all bits before it, the mean of the later bit's
    deviation is 0, and the term's variance the earlier one's square times rate (1 - rate)."""
    x, y = first.double() - rate, second.double() - rate
    squares, variance = x.square().sum().item(), rate * (1 - rate)
    # The sum of squares has a bound of its own, which half of the chance is for.
    largest = max(rate, 1 - rate) ** 2
    fourth = rate * (1 - rate) * ((1 - rate) ** 3 + rate**3)
    most = x.numel() * variance + radius(x.numel() * max(fourth - variance**2, 0.0), largest, chance / 2)
    error = abs((x * y).sum().item()) / radius(most * variance, largest, chance / 2)
    return max(error, squares / most)
