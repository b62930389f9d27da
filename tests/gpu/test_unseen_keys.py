"""KV tiles that no query sees: their gradients are zeros, nothing waits for them, and they change no other bit.

No mask of the package has such tiles, so the test compiles a backward of its own from csrc/, with a mask that is
aligned at the first query and key. Where there are more keys than queries, it is the causal mask of a square problem
with keys behind it that nobody sees.
"""

import ctypes
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


@pytest.fixture(scope="module")
def library(hopper, tmp_path_factory) -> ctypes.CDLL:
    nvcc, package = sm_holder.find_nvcc(), importlib.util.find_spec("cutlass_library")
    if nvcc is None or package is None or not CSRC.is_dir():
        pytest.skip("needs nvcc, nvidia-cutlass and the sources")
    cutlass = pathlib.Path(package.origin).parent / "source" / "include"
    own = pathlib.Path(__file__).with_name("unseen_keys.cu")
    sources = [own, CSRC / "launch/stages.cu", CSRC / "launch/tensor_map.cu"]
    path = tmp_path_factory.mktemp("unseen_keys") / "libunseen_keys.so"
    subprocess.run([nvcc, "-t0", *FLAGS, f"-I{CSRC}", f"-I{cutlass}", *map(str, sources), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.workspace_bytes.restype = ctypes.c_size_t
    return library


def backward(library, tensors, softmax_lse, scale, policy, num_sms):
    """`tensors` are q, k, v, out, dout, dq, dk, dv of one sequence; the last three are written."""
    q, k = tensors[:2]
    shape = (q.shape[1], k.shape[1], q.shape[2], q.shape[3])
    number = schedule.policy_number(policy)
    workspace = torch.empty(library.workspace_bytes(*shape, number), dtype=torch.uint8, device=q.device)
    pointers = (ctypes.c_void_p * 8)(*(x.data_ptr() for x in tensors))
    addresses = (ctypes.c_void_p(softmax_lse.data_ptr()), ctypes.c_void_p(workspace.data_ptr()))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    library.run_backward(pointers, *addresses, *shape, ctypes.c_float(scale), number, num_sms, stream)
    torch.cuda.synchronize()


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
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (inputs.q, k, v))
        tensors = (inputs.q, k, v, inputs.out, inputs.dout, dq, dk, dv)
        backward(library, tensors, inputs.softmax_lse, square.scale, policy, sms)
        found = {"dq": dq, "dk": dk[:, :seqlen_q].contiguous(), "dv": dv[:, :seqlen_q].contiguous()}
        support.assert_same_bits(found, expected, f"{square} {policy}, {behind} keys behind, {sms} SMs")
        for name, x in (("dk", dk), ("dv", dv)):
            assert not x[:, seqlen_q:].any(), f"{name} of keys that no query sees"
