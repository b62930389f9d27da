"""The accuracy bar: every output at most as far from a float64 reference as eager PyTorch in the same 16-bit dtype."""

import torch
from float64_reference import Attention, attention_float64, attention_in_dtype

import gpu_support as support
from gpu_support import Inputs, Problem

# fp32 sums of the same 16-bit products in another order: an element within this fraction of a rounding boundary may
# round to the other side of it. It changes the error of a correctly rounded result by far less than this.
ROUNDING_SLACK = 1.001
LSE_TOLERANCE = 2e-5


def eager(problem: Problem, q, k, v, dout) -> dict[str, torch.Tensor]:
    """out, dq, dk, dv of eager PyTorch at the inputs' dtype; zeros for the leading queries that see no key."""
    unseen = max(0, problem.seqlen_q - problem.seqlen_k) if problem.causal else 0
    result = attention_in_dtype(
        q[:, unseen:], k, v, dout[:, unseen:], softmax_scale=problem.scale, causal=problem.causal
    )._asdict()
    for name in ("out", "dq"):
        result[name] = torch.cat([torch.zeros_like(q[:, :unseen]), result[name]], dim=1)
    return {name: result[name] for name in ("out", "dq", "dk", "dv")}


def cancellation_bound(problem: Problem, q, k, v, dout) -> dict[str, torch.Tensor]:
    """Norms that |dq| and |dk| cannot exceed where one key is all that a query can see: P = 1 and O = V, so the exact
    gradients are 0. Each of dP and D is then the same dot product of head_dim terms, summed in fp32 in any order: they
    differ by at most twice head_dim * 2^-23 * |dO|.|V| (2^-23: tensor cores may truncate), and dS is that difference
    rounded to 16 bits (2^-8 at most)."""
    assert problem.seqlen_k == 1
    group = problem.heads // problem.kv_heads
    q, dout = (x.double().abs() for x in (q, dout))
    k, v = (x.double().abs().repeat_interleave(group, dim=2) for x in (k, v))
    rounding = 2 * problem.head_dim * 2.0**-23 * (1 + 2.0**-8)
    ds = rounding * (dout * v).sum(-1, keepdim=True)
    dk = (ds * q).sum(1).unflatten(1, (problem.kv_heads, group)).sum(2)
    scale = abs(problem.scale)
    return {"dq": (ds * k).norm() * scale, "dk": dk.norm() * scale}


class Bar:
    """Reference and limits of one problem; serves every policy."""

    def __init__(self, problem: Problem, inputs: Inputs):
        arguments = inputs.q, inputs.k, inputs.v, inputs.dout
        self.exact: Attention = attention_float64(*arguments, softmax_scale=problem.scale, causal=problem.causal)
        bounds = cancellation_bound(problem, *arguments) if problem.seqlen_k == 1 else {}
        self.limits = {}
        for name, x in eager(problem, *arguments).items():
            exact = getattr(self.exact, name)
            if name in bounds:
                self.limits[name] = bounds[name]
            else:
                rounding = (exact.to(problem.dtype).double() - exact).norm()
                self.limits[name] = torch.maximum((x.double() - exact).norm(), ROUNDING_SLACK * rounding)

    def errors(self, outputs: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
        """Of each output: the norm of its error, the norm allowed, the norm of the exact result. Waits once."""
        rows = []
        for name, x in outputs.items():
            exact = getattr(self.exact, name)
            rows.append(torch.stack([(x.double() - exact).norm(), self.limits[name], exact.norm()]))
        return dict(zip(outputs, map(tuple, torch.stack(rows).tolist())))

    def failures(self, outputs: dict[str, torch.Tensor]) -> list[str]:
        """One line for each output that misses the bar."""
        lines = []
        for name, (error, limit, norm) in self.errors(outputs).items():
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
        lines += [f"{policy}: {line}" for line in bar.failures(gradients)]
        written = torch.stack([g.writes_outside() for g in guarded.values()]).tolist()
        lines += [f"{policy}: {n} elements written outside {name}" for name, n in zip(guarded, written) if n]
    return lines
