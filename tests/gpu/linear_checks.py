"""Linear layers of the GPU tests: operands, and what their results are held to. Works on any device."""

import dataclasses

import torch
from float64_reference import relative_error
from torch.nn import functional

from dash_attn.dropout import DropoutState, dropout_bits, linear_with_dropout_bits

SIZES = dict(batch=2, heads=3, seqlen_q=300, seqlen_k=1100)
# Rows, columns and depth: tiles are 128 x 256 x 64 and two are below each other in a cluster.
SHAPES = [
    (1, 8, 8), (16, 248, 56), (128, 256, 64), (129, 264, 72), (256, 512, 256), (515, 1032, 520), (300, 8, 4096),
    (1000, 2304, 1024), (2049, 776, 328),
]  # fmt: skip


@dataclasses.dataclass
class Operands:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.x, self.weight, self.bias) if t is not None)

    def exact(self) -> torch.Tensor:
        """y in float64."""
        y = self.x.double() @ self.weight.double().mT
        return y if self.bias is None else y + self.bias.double()


def operands(shape, dtype, device, *, bias=True, whole=False, seed=0) -> Operands:
    """Normal numbers, or `whole` ones, whose sums are exact in fp32 in any order."""
    rows, columns, depth = shape
    generator = torch.Generator().manual_seed(seed)

    def make(*sizes):
        if whole:
            return torch.randint(-3, 4, sizes, generator=generator).to(device, dtype)
        return torch.randn(sizes, generator=generator).to(device, dtype)

    return Operands(make(rows, depth), make(columns, depth), make(columns) if bias else None)


def call(given: Operands, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """y and bits, of a state that is always the same."""
    state = DropoutState.of(2**63 + 12345, 77, given.x.device)
    y, bits = linear_with_dropout_bits(*given.tensors(), **{**dict(state=state, p=0.1), **SIZES, **arguments})
    return y, bits.bits


def expected_bits(device, **arguments) -> torch.Tensor:
    return dropout_bits(DropoutState.of(2**63 + 12345, 77, device), **{**dict(p=0.1), **SIZES, **arguments}).bits


# Both round sums of fp32 once; they differ in the few elements whose sums lie by a rounding of fp32 at the middle of
# two numbers of 16 bits.
MARGIN = 1.01


def check_errors(given: Operands, y: torch.Tensor) -> None:
    """y is no further from float64 than torch's own linear layer of that dtype, as a whole and in its worst element."""
    exact, of_torch = given.exact(), functional.linear(*given.tensors())
    ours, torchs = (relative_error(found, exact) for found in (y, of_torch))
    assert ours <= MARGIN * torchs, f"relative error {ours:.4e}, torch's {torchs:.4e}"
    # An element that is off by more than a rounding of its own is wrong, whatever the others are; sums of fp32 near 0
    # are off by a share of what was added.
    spacing = torch.finfo(y.dtype).eps * exact.abs() + 5e-4 * exact.abs().mean()
    worst, torchs_worst = (((found.double() - exact).abs() / spacing).max().item() for found in (y, of_torch))
    assert worst <= max(0.51, MARGIN * torchs_worst), (
        f"an element is off by {worst:.3f} of the distance of numbers there"
    )


def check_whole_numbers(given: Operands, y: torch.Tensor) -> None:
    """y is the exact sum, rounded once."""
    differ = (y != given.exact().to(y.dtype)).nonzero()
    assert not len(differ), f"{len(differ)} elements differ, the first at {differ[0].tolist()}"
