"""CUDA graphs, streams, devices, memory, and no wait of the host."""

import math

import gpu_support as support
import pytest
import torch
from gpu_load import Perturbation
from gpu_support import Inputs, Problem

from dash_attn import schedule

HEAD_DIMS = pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@MASKS
@HEAD_DIMS
def test_replay_gives_the_eager_bits(head_dims, causal, device):
    problem = Problem(2, 700, 900, 8, 2, head_dims[0], causal, value_head_dim=head_dims[1])
    inputs = support.random_inputs(problem, device, seed=1)
    others = support.random_inputs(problem, device, seed=2)
    load = Perturbation()
    for policy in support.policies(problem):
        gradients = support.backward(inputs, problem, policy)  # loads the kernels before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            support.backward_into(gradients, inputs, problem, policy)
        saved = Inputs(*(x.clone() for x in inputs.tensors()))
        for source in (saved, others, saved):
            expected = support.backward(source, problem, policy)
            support.assert_finite(expected, f"{problem} {policy}")
            for x, new in zip(inputs.tensors(), source.tensors()):
                x.copy_(new)
            load.enqueue(8)
            for x in gradients.values():
                x.fill_(float("nan"))
            graph.replay()
            graph.replay()
            support.assert_same_bits(gradients, expected, f"{problem} {policy}, graph replay")
    load.stop()


@MASKS
@pytest.mark.parametrize("shape, counts", [((2, 512, 512, 8, 2), False), ((8, 515, 515, 8, 8), True)], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_capture_of_forward_and_backward(head_dim, shape, counts, causal, device, num_sms):
    """A whole training step's attention in one graph, with and without a counter of the forward's tiles."""
    problem = Problem(*shape, head_dim, causal)
    assert support.forward_counts_tiles(problem, num_sms) == counts, str(problem)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    expected = support.backward(support.with_forward(problem, q, k, v, dout), problem, "auto")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs = support.with_forward(problem, q, k, v, dout)
        gradients = support.backward(inputs, problem, "auto")
    for _ in range(3):
        for x in (inputs.out, inputs.softmax_lse):  # the gradients are poisoned in the graph
            x.fill_(float("nan"))
        graph.replay()
        support.assert_same_bits(gradients, expected, f"{problem}, graph of forward and backward")


@MASKS
def test_the_host_does_not_wait(causal, device):
    problem = Problem(1, 512, 512, 4, 4, 128, causal)
    inputs = support.random_inputs(problem, device)
    for policy in support.schedules(causal):
        gradients = support.backward(inputs, problem, policy)
        with support.host_must_not_wait(f"{problem} {policy}"):
            support.backward_into(gradients, inputs, problem, policy)
        torch.cuda.synchronize()


@MASKS
@pytest.mark.parametrize("kv_heads", [2, 1])
@HEAD_DIMS
def test_workspace_is_linear_in_the_length(head_dims, kv_heads, causal, device):
    """fp32 dQ and 2%. Where query heads are split over work tiles, fp32 dK and dV too, of whole KV tiles; and where KV
    tiles are divided."""
    heads, (qk, of_values) = 2, head_dims
    for seqlen in (2048, 4096, 8192, 16384):
        problem = Problem(1, seqlen, seqlen, heads, kv_heads, qk, causal, value_head_dim=of_values)
        tile_k = support.tiles_of(problem, "auto").tile_k
        sums = 4 * math.ceil(seqlen / tile_k) * tile_k * kv_heads * (qk + of_values)
        least = 4 * seqlen * heads * qk
        for policy in support.policies(problem):
            used = support.workspace_bytes(problem, policy, device)
            passes = int(kv_heads < heads) + int(schedule.divides(policy))
            allowed = 1.02 * (least + passes * sums) + (1 << 14)
            assert least < used <= allowed, f"{problem} {policy}: {used} bytes"


@MASKS
def test_workspace_is_released(causal, device):
    problem = Problem(1, 1024, 1024, 4, 4, 128, causal)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    support.backward_into(gradients, inputs, problem, "auto")
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        support.backward_into(gradients, inputs, problem, "auto")
    assert torch.cuda.memory_allocated() == before


@MASKS
def test_another_device(causal):
    """Tensors of cuda:1 while cuda:0 is the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    problem = Problem(2, 700, 700, 8, 2, 128, causal)
    for policy in support.schedules(causal):
        q, k, v, dout = support.random_qkv_dout(problem, "cuda:0")
        expected = support.backward(support.with_forward(problem, q, k, v, dout), problem, policy)
        there = support.with_forward(problem, *(x.to("cuda:1") for x in (q, k, v, dout)))
        gradients = support.backward(there, problem, policy)
        assert torch.cuda.current_device() == 0
        gradients = {name: x.to("cuda:0") for name, x in gradients.items()}
        support.assert_same_bits(gradients, expected, f"{problem} {policy}, on cuda:1")
