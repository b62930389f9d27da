"""The check of what the kernels rely on and NVIDIA does not promise: it runs before the first call on a device."""

import subprocess
import sys

import pytest

FIRST_CALL_IN_A_GRAPH = """
import torch
from dash_attn import flash_attn_varlen_func

torch.manual_seed(0)
q, k, v, dout = torch.randn(4, 300, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
lengths = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
leaves = [x.clone().requires_grad_() for x in (q, k, v)]


def step():
    out = flash_attn_varlen_func(*leaves, lengths, lengths, 200, 200, causal=True)
    return out, *torch.autograd.grad(out, leaves, dout)


side = torch.cuda.Stream()
if {warm_up}:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    captured = step()
graph.replay()
torch.cuda.synchronize()
assert all(map(torch.equal, captured, step()))
print("equal")
"""


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_first_call_may_be_captured(warm_up):
    program = FIRST_CALL_IN_A_GRAPH.replace("{warm_up}", str(warm_up))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout == "equal\n", found.stderr[-2000:]
