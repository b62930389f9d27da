"""PyTorch's context parallelism with dash_attn in each of two processes, which talk by gloo."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from float64_reference import attention_float64, attention_in_dtype
from interface_support import kernel_calls, qkv_tensors

import dash_attn.integrations.torch as door

pytest.importorskip("torch.distributed.tensor.experimental._context_parallel", exc_type=ImportError)
if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[2]
PROCESSES, SEQLEN = 2, 64
# (causal, how keys and values get round): load is balanced where the mask is causal.
CASES = [(True, "allgather"), (True, "alltoall"), (False, "allgather")]
NAMES = ("out", "dq", "dk", "dv")


def scaled_dot_product_attention(query, key, value, is_causal=False):
    """As on a GPU: context parallelism does not know the op of a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def problem():
    return qkv_tensors(SEQLEN, SEQLEN, heads=4, kv_heads=4, head_dim=32, batch=2)


def compute(mesh, causal, rotate_method):
    """out, dq, dk and dv of the whole sequence, and the calls of our kernels."""
    from torch.distributed.tensor.experimental import _attention as parallel
    from torch.distributed.tensor.experimental import context_parallel

    parallel.set_rotate_method(rotate_method)
    parallel._cp_options.enable_load_balance = causal
    buffers = [x.detach().transpose(1, 2).contiguous() for x in problem()]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), kernel_calls() as calls:
        inputs = [x.detach().requires_grad_() for x in buffers[:3]]
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        parts = [out.detach(), *torch.autograd.grad(out, inputs, buffers[3])]
        whole = parallel.context_parallel_unshard(mesh, parts, [2] * 4)
    return [x.transpose(1, 2) for x in whole], [name for name, _ in calls]


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    F.scaled_dot_product_attention = scaled_dot_product_attention
    door.activate(device_types=["cpu"], fallback="error")
    torch.save([[compute(mesh, *case) for _ in range(2)] for case in CASES], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each process, of each case, two runs."""
    folder = tmp_path_factory.mktemp("context_parallel")
    torch.multiprocessing.spawn(process, (str(folder),), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_two_processes(results, case):
    """No further from the truth than eager attention on one device, and the same bits in both runs and processes."""
    *inputs, dout = problem()
    causal = CASES[case][0]
    with torch.no_grad():
        exact = attention_float64(*inputs, dout, causal=causal)
    eager = attention_in_dtype(*inputs, dout, causal=causal)
    (actual, calls), _ = results[0][case]
    assert calls == ["forward"] * PROCESSES + ["backward"] * PROCESSES
    for of_process in results:
        for again, _ in of_process[case]:
            assert all(torch.equal(x, y) for x, y in zip(again, actual, strict=True))
    for name, found in zip(NAMES, actual, strict=True):
        truth = getattr(exact, name)
        assert (found.double() - truth).norm() <= (getattr(eager, name).double() - truth).norm(), name


@pytest.mark.parametrize(
    "launcher, script, arguments, words",
    [
        ([], "torch_sdpa.py", ["--steps", "2", "--seqlen", "16"], "dash_attn: .* the same bits twice"),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2"], "context_parallel.py", ["--seqlen", "32"],
         "2 processes on cpu, 32 tokens\nsame bits in both runs: True"),
    ],
    ids=["torch_sdpa", "context_parallel"],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the examples are larger")
def test_examples(launcher, script, arguments, words):
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments]
    package = str(pathlib.Path(door.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout
