"""The forward on its own: its place in memory, and the bits of a row."""

import itertools
import math

import gpu_support as support
import gradient_check
import pytest
import torch
from gpu_load import Perturbation
from gpu_support import GuardedTensor, Problem
from products import pairwise

import dash_attn
from dash_attn._schedule import forward_tile_shape

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COUNTER_BYTES = 4
REPEATS = 50  # of a call whose bits a race would change only now and then


def forward(problem: Problem, q, k, v, sm_margin: int = 0) -> dict[str, torch.Tensor]:
    out, softmax_lse = support.forward(problem, q, k, v, sm_margin)
    return {"out": out, "softmax_lse": softmax_lse}


def kernel_into(out: torch.Tensor, softmax_lse: torch.Tensor, problem: Problem, q, k, v, sm_margin: int = 0) -> None:
    torch.ops.dash_attn_C.forward(q, k, v, out, softmax_lse, **problem.op_arguments, sm_margin=sm_margin)


def output_lines(problem: Problem, outputs: dict[str, torch.Tensor], bar: gradient_check.Bar) -> list[str]:
    return bar.failures({"out": outputs["out"]}) + bar.lse_failures(outputs["softmax_lse"])


# Groups of heads that are packed into a tile where queries are few, some that cannot be, and more rows than one tile.
PACKED_HEADS = [(8, 1), (16, 2), (64, 1), (128, 1), (6, 1), (12, 4), (4, 4)]


@pytest.mark.parametrize("of_all, dtype, causal", pairwise(PACKED_HEADS, DTYPES, (False, True)), ids=str)
def test_packed_heads(of_all, dtype, causal, device):
    lengths = ((1, 1), (1, 700), (3, 257), (17, 16), (40, 300), (129, 129), (200, 90))
    for head_dim, (seqlen_q, seqlen_k) in itertools.product((64, 128, 72), lengths):
        problem = Problem(3, seqlen_q, seqlen_k, *of_all, head_dim, causal, DTYPES[dtype])
        inputs = support.random_inputs(problem, device)
        outputs = {"out": inputs.out, "softmax_lse": inputs.softmax_lse}
        lines = output_lines(problem, outputs, gradient_check.Bar(problem, inputs))
        assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("head_dim", (40, 64, 96, 128))
@MASKS
def test_writes_its_outputs_and_nothing_else(causal, head_dim, device):
    for (seqlen_q, seqlen_k), strided in itertools.product(((1, 5), (130, 200), (257, 257), (300, 100)), (False, True)):
        problem = Problem(2, seqlen_q, seqlen_k, 8, 2, head_dim, causal)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        expected = forward(problem, q, k, v)
        support.assert_finite({"out": expected["out"]}, str(problem))
        make = GuardedTensor.strided if strided else GuardedTensor.contiguous
        out = make(tuple(q.shape), q.dtype, device)
        lse = GuardedTensor.contiguous(tuple(expected["softmax_lse"].shape), torch.float32, device)
        kernel_into(out.tensor, lse.tensor, problem, q, k, v)
        support.assert_same_bits({"out": out.tensor, "softmax_lse": lse.tensor}, expected, f"{problem}, {strided=}")
        for name, guarded in (("out", out), ("softmax_lse", lse)):
            assert guarded.writes_outside().item() == 0, f"{problem}, {strided=}: wrote outside {name}"


@MASKS
def test_memory_is_output_lse_and_counter(causal, device, num_sms):
    """The counter only where CTAs take tiles from it."""
    for seqlen, counts in ((512, False), (4096, causal)):
        problem = Problem(2, seqlen, seqlen, 8, 2, 128, causal)
        assert support.forward_counts_tiles(problem, num_sms) == counts, str(problem)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        outputs = forward(problem, q, k, v)
        needed = sum(x.numel() * x.element_size() for x in outputs.values()) + (COUNTER_BYTES if counts else 0)
        used = support.requested_bytes(lambda: forward(problem, q, k, v))
        assert used == needed, f"{problem}: {used} bytes, {needed} expected"


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@MASKS
def test_sm_margin_changes_no_bits(causal, head_dim, device, num_sms):
    problem = Problem(2, 700, 900, 16, 4, head_dim, causal)
    q, k, v, _ = support.random_qkv_dout(problem, device)
    expected = forward(problem, q, k, v)
    for sm_margin in (1, 7, num_sms // 2, num_sms - 2, num_sms - 1):
        out, lse = (torch.full_like(x, math.nan) for x in expected.values())
        kernel_into(out, lse, problem, q, k, v, sm_margin)
        support.assert_same_bits({"out": out, "softmax_lse": lse}, expected, f"{problem}, {sm_margin=}")


CONTRACT_LENGTHS = [(1, 300), (5, 5), (64, 200), (515, 515), (700, 300), (2049, 2049)]


@pytest.mark.parametrize(
    "lengths, of_all, causal", pairwise(CONTRACT_LENGTHS, [(4, 4), (8, 1)], (False, True)), ids=str
)
def test_contract_on_bits(lengths, of_all, causal, device):
    """Output, log-sum-exp and gradients of a sequence: alone, in a batch of 8 at every place, beside two sets of
    others."""
    for head_dim in (64, 96, 128):
        alone = Problem(1, *lengths, *of_all, head_dim, causal)
        batch = Problem(8, *lengths, *of_all, head_dim, causal)
        inputs = support.random_inputs(alone, device, seed=1)
        expected = {"out": inputs.out, "softmax_lse": inputs.softmax_lse, **support.backward(inputs, alone, "auto")}
        support.assert_finite({name: expected[name] for name in ("out", *support.GRADIENTS)}, str(alone))
        for seed, place in itertools.product((2, 3), (0, 3, 7)):
            q, k, v, dout = support.random_qkv_dout(batch, device, seed)
            for x, own in ((q, inputs.q), (k, inputs.k), (v, inputs.v), (dout, inputs.dout)):
                x[place] = own[0]
            among = support.with_forward(batch, q, k, v, dout)
            outputs = {"out": among.out, "softmax_lse": among.softmax_lse, **support.backward(among, batch, "auto")}
            own = {name: x[place : place + 1] for name, x in outputs.items()}
            support.assert_same_bits(own, expected, f"{batch}, others {seed}, place {place}")


@MASKS
def test_a_head_has_the_bits_it_has_alone(causal, device):
    """Whether its group is packed into a tile or not, and whoever is in it."""
    for head_dim, group, seqlen_q in itertools.product((64, 96, 128), (8, 6), (1, 20, 150)):
        problem = Problem(2, seqlen_q, 500, group, 1, head_dim, causal)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        together = forward(problem, q, k, v)
        for head in range(group):
            alone = forward(Problem(2, seqlen_q, 500, 1, 1, head_dim, causal), q[:, :, head : head + 1], k, v)
            out, softmax_lse = together["out"][:, :, head : head + 1], together["softmax_lse"][:, head : head + 1]
            own = {"out": out, "softmax_lse": softmax_lse}
            support.assert_same_bits(own, alone, f"{problem}, head {head}")


@MASKS
def test_values_that_are_not_finite_stay_in_their_rows(causal, device):
    """NaN and infinite scores end as NaN in the rows that see them, as in a plain softmax, and nowhere else; each
    time."""
    for head_dim, value in itertools.product((64, 96, 128), (math.nan, math.inf, -math.inf)):
        problem = Problem(2, 300, 300, 2, 2, head_dim, causal)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        clean = forward(problem, q, k, v)
        q[1, 137, 1, 5] = value
        for call in range(REPEATS):
            outputs = forward(problem, q, k, v)
            assert outputs["out"][1, 137, 1].isnan().all() and outputs["softmax_lse"][1, 1, 137].isnan()
            outputs["out"][1, 137, 1] = clean["out"][1, 137, 1]
            outputs["softmax_lse"][1, 1, 137] = clean["softmax_lse"][1, 1, 137]
            support.assert_same_bits(outputs, clean, f"{problem}, {value} in one query, call {call}")


# seqlen_q, seqlen_k, heads, kv_heads: two CTAs write the same rows (csrc/forward) where the first query tile is short,
# at many lengths, and a head's rows lie in other tiles where its group is packed.
SHARED_ROWS = [
    (1000, 1000, 2, 2),
    (129, 193, 2, 2),
    (300, 300, 4, 2),
    (20, 600, 8, 1),
    (700, 450, 2, 1),
    # The tile that a row sees first has more keys for others.
    (148, 276, 2, 2),
    (515, 643, 2, 2),
    (700, 900, 2, 2),
]


@pytest.mark.parametrize(
    "shape, value, head_dim", pairwise(SHARED_ROWS, (math.nan, math.inf, -math.inf), (64, 96, 128)), ids=str
)
def test_rows_are_not_spoilt_by_values_in_kv_tiles_they_do_not_see(head_dim, value, shape, device):
    """Rows that see a value that is not finite are not finite. Those that see no key of its KV tile have the bits that
    they have without it, in every call: two CTAs that write the same rows must not race."""
    problem = Problem(2, *shape, head_dim, True)
    group, diagonal = problem.heads // problem.kv_heads, problem.seqlen_k - problem.seqlen_q
    clean_v = support.random_qkv_dout(problem, device)[2]
    _, kv_tile = forward_tile_shape(head_dim)
    for key in {kv_tile, problem.seqlen_k - 1, problem.seqlen_k // 2, max(0, problem.seqlen_k - 46)}:
        q, k, v, _ = support.random_qkv_dout(problem, device)
        clean = forward(problem, q, k, clean_v)
        v[1, key, 0, 5] = value
        blind = max(0, min(problem.seqlen_q, key // kv_tile * kv_tile - diagonal))  # rows that see no key of the tile
        for call in range(REPEATS):
            outputs = forward(problem, q, k, v)
            what = f"{problem}, {value} in v at key {key}, call {call}"
            seeing = outputs["out"][1, max(0, key - diagonal) :, :group, 5]
            assert not seeing.isfinite().any(), f"{what}: a row that sees it is finite"
            sharing = outputs["out"][1, blind : max(0, key - diagonal), :group, 5]
            assert sharing.isnan().all(), f"{what}: of the rows that see only others of its tile, one has other bits"
            spoilt = outputs["out"][1, :, :group].clone()
            outputs["out"][1, blind:, :group] = clean["out"][1, blind:, :group]
            mismatch = support.first_mismatch("out", outputs["out"], clean["out"])
            assert mismatch is None, f"{what}: {mismatch}"
            support.assert_same_bits({"lse": outputs["softmax_lse"]}, {"lse": clean["softmax_lse"]}, what)
            if call == 0:
                first = spoilt
            assert support.first_mismatch("out", spoilt, first) is None, f"{what}: other bits than in call 0"


@pytest.mark.parametrize("dtype", DTYPES)
@MASKS
def test_large_scores(causal, dtype, device):
    """Scores of some hundreds, so that the running maximum jumps and most weights vanish."""
    for head_dim, softmax_scale in itertools.product((64, 96, 128), (4.0, -4.0)):
        problem = Problem(2, 400, 700, 4, 2, head_dim, causal, DTYPES[dtype], softmax_scale)
        inputs = support.random_inputs(problem, device)
        outputs = {"out": inputs.out, "softmax_lse": inputs.softmax_lse}
        lines = output_lines(problem, outputs, gradient_check.Bar(problem, inputs))
        assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@MASKS
def test_scores_that_climb(causal, head_dim, dtype, device):
    """From KV tile to KV tile, by less and by more than a row's reference may lag behind (8 of the logarithm to base
    2), among scores below zero, above it and of both kinds."""
    problem = Problem(1, 400, 1100, 2, 1, head_dim, causal, DTYPES[dtype], softmax_scale=1.0)
    tile = torch.arange(problem.seqlen_k, device=device) // forward_tile_shape(head_dim, head_dim)[1]
    for climb, last in itertools.product((-9.0, 0.5, 5.4, 5.7, 12.0, 30.0), (-300.0, -7.0, -5.0, 0.0, 100.0)):
        q, k, v, dout = support.random_qkv_dout(problem, device)
        q *= 0.3 / head_dim**0.5
        q[..., 0] = 1
        k[..., 0] = (last + climb * (tile[-1] - tile))[None, :, None]
        inputs = support.with_forward(problem, q, k, v, dout)
        outputs = {"out": inputs.out, "softmax_lse": inputs.softmax_lse}
        lines = output_lines(problem, outputs, gradient_check.Bar(problem, inputs))
        assert not lines, f"{problem}, {climb=}, {last=}:\n" + "\n".join(lines)


@pytest.mark.parametrize("head_dim", (64, 128))
@MASKS
def test_200_calls_under_load(causal, head_dim, device):
    problem = Problem(2, 1100, 1100, 16, 4, head_dim, causal)
    q, k, v, _ = support.random_qkv_dout(problem, device)
    expected = forward(problem, q, k, v)
    support.assert_finite(expected, str(problem))
    load = Perturbation()
    for first in range(0, 200, 20):
        load.enqueue(20)
        for call in range(first, first + 20):
            load.move_allocations()
            support.assert_same_bits(forward(problem, q, k, v), expected, f"{problem}, call {call}")
    load.stop()


# With fixed shares, and with a counter, whose clearing must be captured too: else a replay computes too few tiles.
@pytest.mark.parametrize(
    "shape, causal, counts",
    [
        ((2, 700, 900, 8, 2), False, False),
        ((2, 512, 512, 8, 2), True, False),
        ((8, 515, 515, 8, 8), False, True),
        ((8, 515, 515, 8, 8), True, True),
        ((4, 4096, 4096, 16, 16), True, True),
    ],
    ids=str,
)
def test_graph_replay_gives_the_eager_bits(shape, causal, counts, device, num_sms):
    problem = Problem(*shape, 128, causal)
    assert support.forward_counts_tiles(problem, num_sms) == counts, str(problem)
    q, k, v, _ = support.random_qkv_dout(problem, device)
    forward(problem, q, k, v)  # loads the kernels before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward(problem, q, k, v)
    for seed in (1, 2):
        for x, new in zip((q, k, v), support.random_qkv_dout(problem, device, seed)):
            x.copy_(new)
        expected = forward(problem, q, k, v)
        for replay in range(2):
            for x in outputs.values():
                x.fill_(math.nan)
            graph.replay()
            support.assert_same_bits(outputs, expected, f"{problem}, inputs {seed}, replay {replay}")


@MASKS
def test_opcheck(causal, device):
    for head_dim, (seqlen_q, seqlen_k) in itertools.product((64, 96, 128), ((130, 200), (200, 130), (1, 70))):
        problem = Problem(2, seqlen_q, seqlen_k, 4, 2, head_dim, causal)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        arguments = dict(problem.op_arguments, sm_margin=3)
        torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v), arguments)


@MASKS
def test_compiles_to_one_graph_with_the_same_bits(causal, device):
    problem = Problem(2, 300, 420, 8, 2, 64, causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)

    def step(q, k, v):
        return dash_attn.flash_attn_func(q, k, v, causal=causal)

    def outputs(function) -> dict[str, torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return dict(zip(("out", *support.GRADIENTS), (out.detach(), *torch.autograd.grad(out, leaves, dout))))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    support.assert_same_bits(outputs(compiled), outputs(step), f"{problem}, compiled")


def test_second_differentiation_raises(device):
    problem = Problem(1, 64, 64, 2, 2, 64, True)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(dash_attn.flash_attn_func(q, k, v, causal=True), q, dout, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), q)
