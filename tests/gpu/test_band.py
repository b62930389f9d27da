"""A mask of which both ends move from query to query, which no mask of the package does yet: what it takes is there
in the kernels, and tried with kernels that the test compiles from csrc/.

Query i sees the last 500 keys up to key i. So there may be KV tiles that no query sees (their gradients are zeros, and
nothing waits for them), queries that see no key, and KV tiles at either end that a query tile, or some of its
warpgroups, pass over. Where there are at most 500 queries, it is the causal mask of a square problem with keys behind
it that nobody sees, and must give its bits.
"""

import ctypes
import dataclasses
import importlib.util
import pathlib
import subprocess

import gpu_support as support
import pytest
import sm_holder
import torch
from gpu_support import Problem

from dash_attn import schedule

ROOT = pathlib.Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FLAGS = (
    "-O3 -std=c++17 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -shared -Xcompiler=-fPIC "
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"
).split()
BAND_KEYS = 500


class BandProblem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim")] + [
        ("softmax_scale", ctypes.c_float),
        ("policy", ctypes.c_int),
        ("num_sms", ctypes.c_int),
    ]


@dataclasses.dataclass
class Tensors:
    """One sequence's, in the order of band.cu; the outputs are poisoned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    softmax_lse: torch.Tensor

    @classmethod
    def of(cls, q, k, v, dout) -> "Tensors":
        def poisoned(x):
            return torch.full_like(x, float("nan"))

        lse = torch.full((1, q.shape[2], q.shape[1]), float("nan"), device=q.device)
        return cls(q, k, v, poisoned(q), dout, poisoned(q), poisoned(k), poisoned(v), lse)

    def pointers(self):
        tensors = (self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv)
        return (ctypes.c_void_p * 8)(*(x.data_ptr() for x in tensors))


@pytest.fixture(scope="module")
def library(hopper, tmp_path_factory) -> ctypes.CDLL:
    nvcc, package = sm_holder.find_nvcc(), importlib.util.find_spec("cutlass_library")
    if nvcc is None or package is None or not CSRC.is_dir():
        pytest.skip("needs nvcc, nvidia-cutlass and the sources")
    cutlass = pathlib.Path(package.origin).parent / "source" / "include"
    sources = [pathlib.Path(__file__).with_name("band.cu"), CSRC / "launch/stages.cu", CSRC / "launch/tensor_map.cu"]
    path = tmp_path_factory.mktemp("band") / "libband.so"
    subprocess.run([nvcc, "-t0", *FLAGS, f"-I{CSRC}", f"-I{cutlass}", *map(str, sources), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.workspace_bytes.restype = ctypes.c_size_t
    return library


def run(library, tensors: Tensors, policy: str, num_sms: int, *, backward: bool) -> None:
    _, seqlen_q, heads, head_dim = tensors.q.shape
    _, seqlen_k, kv_heads, _ = tensors.k.shape
    number = schedule.policy_number(policy)
    problem = BandProblem(seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim**-0.5, number, num_sms)
    size = library.workspace_bytes(ctypes.byref(problem))
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors.q.device)
    addresses = (ctypes.c_void_p(tensors.softmax_lse.data_ptr()), ctypes.c_void_p(workspace.data_ptr()))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    library.run_band(ctypes.byref(problem), tensors.pointers(), *addresses, ctypes.c_bool(backward), stream)
    torch.cuda.synchronize()


def visible(seqlen_q: int, seqlen_k: int, device) -> torch.Tensor:
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return ones.tril(0) & ones.triu(1 - BAND_KEYS)


def plain_attention(q, k, v, dout, seen) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv of one sequence in the dtype of its inputs; rows that see no key give zeros."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k_all) * q.shape[3] ** -0.5
    p = s.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen.any(1, keepdim=True), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v_all)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("policy", ["ascending", "descending", "spt"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(256, 1024), (200, 1300), (1, 700), (500, 501)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_no_query_sees(head_dim, seqlen_q, seqlen_k, policy, library, device, num_sms):
    square = Problem(1, seqlen_q, seqlen_q, 6, 6, head_dim, True)
    inputs = support.random_inputs(square, device)
    expected = support.backward(inputs, square, policy)
    behind = seqlen_k - seqlen_q
    unseen = torch.full((1, behind, 6, head_dim), float("nan"), dtype=torch.bfloat16, device=device)
    # In the tile that the last query sees keys of, what it does not see must be finite (docs/forward.md).
    unseen[:, : -seqlen_q % 128] = 1.0
    k, v = (torch.cat([x, unseen], dim=1) for x in (inputs.k, inputs.v))
    for sms in (num_sms, 1):
        tensors = Tensors.of(inputs.q, k, v, inputs.dout)
        run(library, tensors, policy, sms, backward=False)
        support.assert_same_bits(
            {"out": tensors.out, "softmax_lse": tensors.softmax_lse},
            {"out": inputs.out, "softmax_lse": inputs.softmax_lse},
            f"{square}, {behind} keys behind, {sms} SMs",
        )
        run(library, tensors, policy, sms, backward=True)
        found = {"dq": tensors.dq, "dk": tensors.dk[:, :seqlen_q], "dv": tensors.dv[:, :seqlen_q]}
        found = {name: x.contiguous() for name, x in found.items()}
        support.assert_same_bits(found, expected, f"{square} {policy}, {behind} keys behind, {sms} SMs")
        for name, x in (("dk", tensors.dk), ("dv", tensors.dv)):
            assert not x[:, seqlen_q:].any(), f"{name} of keys that no query sees"


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(2000, 2000), (1777, 900), (900, 1777), (3001, 2999)])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_band(head_dim, heads, kv_heads, seqlen_q, seqlen_k, library, device, num_sms):
    problem = Problem(1, seqlen_q, seqlen_k, heads, kv_heads, head_dim, True)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    seen = visible(seqlen_q, seqlen_k, device)
    exact = plain_attention(*(x.double() for x in (q, k, v, dout)), seen)
    rounded = plain_attention(q, k, v, dout, seen)
    bits = None
    for policy in ("descending", "spt", "order_free"):
        for sms in (num_sms, 3):
            tensors = Tensors.of(q, k, v, dout)
            run(library, tensors, policy, sms, backward=False)
            run(library, tensors, policy, sms, backward=True)
            for name, expected, bar in zip(("out", "dq", "dk", "dv"), exact, rounded, strict=True):
                error = (getattr(tensors, name).double() - expected).norm() / expected.norm()
                limit = (bar.double() - expected).norm() / expected.norm()
                assert error <= limit, f"{problem} {policy} {sms} SMs: error of {name} {error:.2e} > {limit:.2e}"
            rows_without_keys = ~seen.any(1)
            assert torch.isposinf(tensors.softmax_lse[..., rows_without_keys]).all()
            assert not tensors.out[:, rows_without_keys].any() and not tensors.dq[:, rows_without_keys].any()
            found = {name: getattr(tensors, name) for name in ("out", "softmax_lse", *support.GRADIENTS)}
            if sms != num_sms:
                support.assert_same_bits(found, bits, f"{problem} {policy} on {sms} SMs")
            bits = found
