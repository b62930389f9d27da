"""The accuracy bar: every output at most as far from a float64 reference as eager PyTorch in the same 16-bit dtype, at
most NEAR times as far as float64 sums with our roundings, and every row of it within the bound of what rounding can do,
so that a small row that is wrong shows beside large ones."""

import collections
from collections.abc import Callable, Iterable

import gpu_support as support
import torch
from float64_reference import Attention, attention_float64, error_limits, rounds_difference, visible_keys
from gpu_support import Inputs, Problem

LSE_TOLERANCE = 2e-5
# Rounding errors of second order and those of fp32, beside the first-order bound of 16-bit rounding.
ROW_SLACK = 1.05
FEWEST_KEYS_OF_A_TILE = 80  # of the KV tiles that there are
# Of problems with fewer queries or keys the norm of an error, ours and PyTorch's alike, is up to chance.
FEW_ROWS = 64
DRAWS_OF_FEW = 4
ORDER_FREE_DQ = "dq of order_free"  # where its rows have a bound of their own


# The most that the instruction tanh.approx.f32 errs by, relative to the result (PTX ISA 9.0, 9.7.3 "tanh").
TANH_ERROR = 2.0**-10.987


def row_bounds(problem: Problem, inputs: Inputs, exact: Attention, kernel: bool = True) -> dict[str, torch.Tensor]:
    """Bounds (batch, seqlen, heads) of the error of each row of the outputs that have rows, from the triangle
    inequality.

    With r the unit roundoff of the dtype: P and dS enter products rounded (r |P|, r |dS|), D comes from the rounded
    output (r P |dO| |O|), each sum is rounded at the end (r of the sum of its terms' norms). The kernel makes dS of the
    rounded P, and may round dP - D too: r |dS| each. Below the normal numbers, rounding errs by half the smallest
    subnormal; below those of fp32, P is 0.

    A softcap's score S = c tanh(x) errs by t |S|, where t is TANH_ERROR of the kernel and 0 of the reference, and
    forward and backward may err apart. LSE, a logarithm of a mean, then errs by M = sum_j P (e^(t |S|) - 1) at most, so
    P by a factor of e^(t |S| + M), O and D by the sums of that, and the derivative 1 - tanh^2 by 2 t tanh^2.
    """
    group = problem.heads // problem.kv_heads
    info = torch.finfo(problem.dtype)
    q, dout, out = (x.float().transpose(1, 2) for x in (inputs.q, inputs.dout, inputs.out))
    k, v = (x.float().repeat_interleave(group, dim=2).transpose(1, 2) for x in (inputs.k, inputs.v))
    hidden = ~visible_keys(problem.seqlen_q, problem.seqlen_k, device=q.device, **problem.mask)
    scores = inputs.scores.of(q @ k.mT * problem.scale)
    of_cap = inputs.scores.derivative(scores)
    p = (scores - exact.softmax_lse.float()[..., None]).exp_().masked_fill_(hidden, 0.0)
    delta = (dout.double() * exact.out.transpose(1, 2)).sum(-1, keepdim=True).float()
    if inputs.scores.dsoftmax_lse is not None:
        dlse = inputs.scores.dsoftmax_lse.masked_fill(exact.softmax_lse.isinf(), 0.0)
        delta -= dlse[..., None]
    dout_norm, out_norm = dout.norm(dim=-1, keepdim=True), out.norm(dim=-1, keepdim=True)
    subnormal = info.smallest_normal * info.eps
    kept, kept_scale = inputs.scores.kept(torch.float32), inputs.scores.kept_scale
    dp = dout @ v.mT * (kept * kept_scale)
    p_of_tanh = ds_of_tanh = 0.0
    if problem.softcap and kernel:
        exponents = TANH_ERROR * scores.abs()
        p_of_tanh = p * torch.expm1(exponents + (p * exponents.expm1()).sum(-1, keepdim=True))
        d_of_tanh = (p_of_tanh * dp.abs()).sum(-1, keepdim=True)
        of_derivative = 2 * TANH_ERROR * (scores / problem.softcap).square()
        distance = (dp - delta).abs_()
        ds_of_tanh = of_cap * (p_of_tanh * distance + p * d_of_tanh) + of_derivative * p * distance
    p = p.mul_(info.eps).add_(torch.finfo(torch.float32).smallest_normal).add_(subnormal)
    # Had from the rounded P, the derivative of a softcap errs by twice P's relative error over the cap.
    of_cap = of_cap + 2 / problem.softcap if problem.softcap else of_cap
    roundings = 2 + (1 + rounds_difference(inputs.q, inputs.v) if kernel else 0)  # of dS and its sum; P holds 2 r
    ds = dp.sub_(delta).abs_().mul_(roundings / 2).add_(dout_norm * out_norm).mul_(p).mul_(of_cap)
    ds = ds.add_(kept_scale * subnormal).add_(ds_of_tanh)
    p = (p + p_of_tanh) * (kept * kept_scale)

    def of_kv_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (problem.kv_heads, group)).sum(2)

    scale = abs(problem.scale)
    bounds = {
        "out": p @ v.norm(dim=-1, keepdim=True),
        "dq": scale * (ds @ k.norm(dim=-1, keepdim=True)),
        "dk": scale * of_kv_heads(ds.mT @ q.norm(dim=-1, keepdim=True)),
        "dv": of_kv_heads(p.mT @ dout_norm),
    }
    if problem.sinks:
        # Which may leave a row next to no weight: order-free sums promise half a unit a KV tile (docs/order_free.md).
        largest_k = k.abs().amax(dim=-1, keepdim=True)
        largest = (largest_k * v.norm(dim=-1, keepdim=True)).amax(dim=2, keepdim=True)
        of_row = dout_norm * largest + delta.abs() * largest_k.amax(dim=2, keepdim=True)
        tiles = -(-problem.seqlen_k // FEWEST_KEYS_OF_A_TILE)
        units = scale * tiles * 2.0**-30 / 1.5 * k.shape[-1] ** 0.5 * of_row
        bounds[ORDER_FREE_DQ] = bounds["dq"] + units
    # Of the output itself where it is below the normal numbers.
    last = 0.5 * subnormal * max(problem.head_dims.values()) ** 0.5
    return {name: ROW_SLACK * (x.squeeze(-1).transpose(1, 2).double() + last) for name, x in bounds.items()}


class Bar:
    """Reference and limits of one problem; serves every policy. `kernel`: whether the roundings allowed are the
    kernel's or those of the reference that runs for CPU tensors; default: as the device says."""

    def __init__(self, problem: Problem, inputs: Inputs, kernel: bool | None = None):
        arguments = inputs.q, inputs.k, inputs.v, inputs.dout
        formula = dict(softmax_scale=problem.scale, scores=inputs.scores, **problem.mask)
        self.exact: Attention = attention_float64(*arguments, **formula)
        kernel = inputs.q.is_cuda if kernel is None else kernel
        self.row_bounds = row_bounds(problem, inputs, self.exact, kernel)
        self.limits = error_limits(self.exact, *arguments, inputs.out, rounded_factors=kernel, **formula)

    def row_bound(self, name: str, policy: str | None) -> torch.Tensor:
        of_policy = ORDER_FREE_DQ if name == "dq" and policy == "order_free" else name
        return self.row_bounds.get(of_policy, self.row_bounds[name])

    def row_excess(self, name: str, x: torch.Tensor, policy: str | None = None) -> torch.Tensor:
        if name not in self.row_bounds:  # a number for each head
            return torch.where(x.isfinite(), 0.0, torch.inf)
        return (x.double() - getattr(self.exact, name)).norm(dim=-1) - self.row_bound(name, policy)

    def errors(
        self, outputs: dict[str, torch.Tensor], policy: str | None = None
    ) -> dict[str, tuple[float, float, float, float]]:
        """Of each output: the norm of its error, the norm allowed, the norm of the exact result, and how far beyond its
        bound the worst row is. Waits once."""
        rows = []
        for name, x in outputs.items():
            exact = getattr(self.exact, name)
            error = (x.double() - exact).norm()
            rows.append(torch.stack([error, self.limits[name], exact.norm(), self.row_excess(name, x, policy).max()]))
        return dict(zip(outputs, map(tuple, torch.stack(rows).tolist())))

    def failures(self, outputs: dict[str, torch.Tensor], policy: str | None = None) -> list[str]:
        """One line for each output that misses the bar."""
        lines = []
        for name, (error, limit, norm, row_excess) in self.errors(outputs, policy).items():
            if not row_excess <= 0:
                excess = self.row_excess(name, outputs[name], policy).nan_to_num(nan=torch.inf)
                if name not in self.row_bounds:
                    lines.append(f"{name}: not finite")
                    continue
                b, s, h = (int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
                bound = self.row_bound(name, policy)[b, s, h].item()
                lines.append(
                    f"{name}[{b}, {s}, {h}]: the row is off by {bound + excess[b, s, h].item():.3e} in norm, rounding "
                    f"explains {bound:.3e}; {int((excess > 0).sum())} rows of {excess.numel()} are off"
                )
            if not error <= limit:
                unit = norm or 1.0
                kind = "relative error" if norm else "norm (the exact gradient is 0)"
                lines.append(f"{name}: {kind} {error / unit:.3e}, allowed {limit / unit:.3e}")
        return lines

    def lse_failures(self, softmax_lse: torch.Tensor) -> list[str]:
        exact = self.exact.softmax_lse
        seen = exact.isfinite()
        if not bool((softmax_lse.isinf() == ~seen).all()):
            return ["softmax_lse: must be infinite for the rows that see no key, and for no other"]
        error = (softmax_lse.double() - exact).abs()[seen]
        if error.numel() and not bool((error <= LSE_TOLERANCE * (1 + exact.abs()[seen])).all()):
            return [f"softmax_lse: off by up to {error.max().item():.3e}"]
        return []


def check(problem: Problem, device: str, policies: list[str], seed: int = 0) -> list[str]:
    """What is wrong with the forward, or with the backward under any of `policies`, a line each."""
    inputs = support.random_inputs(problem, device, seed)
    bar = Bar(problem, inputs)
    lines = bar.failures({"out": inputs.out}) + bar.lse_failures(inputs.softmax_lse)
    if lines:
        return [f"forward: {line}" for line in lines]
    for policy in policies:
        guarded = support.empty_gradients(inputs)
        gradients = {name: g.tensor for name, g in guarded.items()}
        support.backward_into(gradients, inputs, problem, policy)
        lines += [f"{policy}: {line}" for line in bar.failures(gradients, policy)]
        written = torch.stack([g.writes_outside() for g in guarded.values()]).tolist()
        lines += [f"{policy}: {n} elements written outside {name}" for name, n in zip(guarded, written) if n]
    return lines


def check_together(problems: Iterable[Problem], device: str, policies_of: Callable[[Problem], list[str]]) -> list[str]:
    """As `check` of each problem, but that of problems of few rows the norms are judged over all of them, and over
    several draws, and may differ by a deviation of the norm of so many rows: ours and PyTorch's are up to chance there.
    Of a row that sees a key or two they are alike, since D of a rounded output is most of both."""
    lines = []
    squares = collections.defaultdict(lambda: [0.0, 0.0, 0])  # by policy and output: of errors and of limits; rows
    few = {x: min(x.seqlen_q, x.seqlen_k) < FEW_ROWS for x in problems}
    draws = [(x, seed) for x, has_few in few.items() for seed in range(DRAWS_OF_FEW if has_few else 1)]
    for problem, seed in draws:
        inputs = support.random_inputs(problem, device, seed)
        bar = Bar(problem, inputs)
        has_few = few[problem]

        def judge(policy: str, outputs: dict[str, torch.Tensor], problem=problem, bar=bar, has_few=has_few) -> None:
            for name, (error, limit, _, row_excess) in bar.errors(outputs, policy).items():
                if has_few and name != "dsinks":
                    squares[policy, name][0] += error**2
                    squares[policy, name][1] += limit**2
                    squares[policy, name][2] += outputs[name][..., 0].numel()
                elif not error <= limit:
                    lines.append(f"{problem} {policy}: {name} is off by {error:.3e} in norm, allowed {limit:.3e}")
                if not row_excess <= 0:
                    lines.append(f"{problem} {policy}: {name}: a row is off by {row_excess:.3e} more than rounding")

        judge("forward", {"out": inputs.out})
        lines += [f"{problem} forward: {line}" for line in bar.lse_failures(inputs.softmax_lse)]
        for policy in policies_of(problem):
            guarded = support.empty_gradients(inputs)
            gradients = {name: g.tensor for name, g in guarded.items()}
            support.backward_into(gradients, inputs, problem, policy)
            judge(policy, gradients)
            written = torch.stack([g.writes_outside() for g in guarded.values()]).tolist()
            lines += [f"{problem} {policy}: {n} elements written outside {x}" for x, n in zip(guarded, written) if n]
    for (policy, name), (error, limit, rows) in squares.items():
        allowed = (1 + (2 * rows) ** -0.5) * limit**0.5
        if not error**0.5 <= allowed:
            lines.append(f"{policy}: {name} is off by {error**0.5:.3e} in norm, allowed {allowed:.3e}")
    return lines
