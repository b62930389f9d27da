"""How packs are called: CUDA graphs, a host that does not wait, SMs that others hold, padding, packed tensors,
compile."""

import dataclasses
import random
import subprocess
import sys
import time

import gpu_support as support
import pack_checks
import pytest
import torch
from gpu_support import GRADIENTS, Problem
from pack_checks import MASKS, Pack, Pool, assert_as_alone, lay_out, make_pack, varlen_attention
from products import pairwise
from test_progress import FREE_SMS_FOR_A_CLUSTER, HOLD_LIMIT_S

import dash_attn
from dash_attn import schedule

KINDS = pytest.mark.parametrize("kind", MASKS)
WIDE = ((192, 128), (256, 256))
EVERY_HEAD_DIMS = pytest.mark.parametrize("head_dims", ((64, 64), (96, 96), (128, 128), *WIDE), ids=str)
HEAD_DIMS = pytest.mark.parametrize("head_dim", (64, 96, 128))
# Chunks and a window of both sides, beside no mask and the causal one.
FEW_MASKS = {
    "full": MASKS["full"][0],
    "causal": MASKS["causal"][0],
    "window": dict(causal=False, window=(64, 64)),
    "chunks": dict(causal=True, attention_chunk=100),
}
FEW = pytest.mark.parametrize("mask", FEW_MASKS)


def problem_of(heads: int, kv_heads: int, head_dim: int, **mask) -> Problem:
    """What the sequences of a pack have in common."""
    return dataclasses.replace(Problem(1, 0, 0, heads, kv_heads, head_dim, causal=False), **mask)


def everything(problem: Problem) -> list[str]:
    return ["auto", *support.policies(problem)]


# Packs of six sequences in as many rows.
CAPACITY_Q, CAPACITY_K, LONGEST = 1500, 1700, 1000
REPLAYED = (
    ((129, 129), (0, 0), (64, 65), (1000, 1000), (1, 300), (65, 1)),
    ((0, 0),) * 6,
    ((0, 64), (0, 0), (1000, 129), (70, 0), (127, 1000), (63, 63)),
    ((1, 1),) * 6,
    ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (1000, 1000)),
    ((200, 200),) * 6,
)


def pack_of_capacity(pool: Pool, lengths, chance: random.Random) -> Pack:
    rows_q, rows_k = (lay_out(own, chance, total=total) for own, total in zip(zip(*lengths), (CAPACITY_Q, CAPACITY_K)))
    sequences = [pool.get(*own) for own in lengths]
    longest = LONGEST, torch.tensor(LONGEST, device=pool.device)
    return make_pack(sequences, rows_q, rows_k, seqused=(True, True), max_seqlens=longest)


@EVERY_HEAD_DIMS
@FEW
def test_replay_with_other_lengths(mask, head_dims, perturbation, device):
    """One graph of both passes serves every pack of as many rows and sequences."""
    problem = problem_of(8, 2, head_dims[0], value_head_dim=head_dims[1], **FEW_MASKS[mask])
    pool, chance = Pool(problem, device), random.Random(0)
    packs = [pack_of_capacity(pool, lengths, chance) for lengths in REPLAYED]
    for policy in everything(pool.problem):
        static = pack_of_capacity(pool, REPLAYED[0], chance)
        for _ in range(2):
            varlen_attention(static, policy)  # loads the kernels before the capture
        for pack in packs:
            pack_checks.expected_outputs(pack, policy)  # the dense calls
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = varlen_attention(static, policy)
        for pack in (*packs, *packs[::-1]):
            for x, new in zip(static.tensors(), pack.tensors()):
                x.copy_(new)
            perturbation.enqueue(4)
            for x in outputs.values():
                x.fill_(float("nan"))
            graph.replay()
            assert_as_alone(pack, {policy: outputs}, "graph replay")


@FEW
def test_replay_without_seqused(mask, device):
    """Lengths from cu_seqlens alone; a sequence may grow to all rows."""
    pool = Pool(problem_of(4, 4, 128, **FEW_MASKS[mask]), device)
    lengths = (((300, 300), (0, 0), (300, 300)), ((0, 0), (600, 600), (0, 0)), ((1, 1), (2, 2), (597, 597)))
    rows = [lay_out([q for q, _ in own], random.Random(1), total=610) for own in lengths]
    packs = [make_pack([pool.get(*n) for n in own], at, at) for own, at in zip(lengths, rows)]
    for policy in everything(pool.problem):
        static = make_pack(packs[0].sequences, rows[0], rows[0])
        assert static.seqused_q is None and static.seqused_k is None
        for pack in packs:
            assert_as_alone(pack, {policy: varlen_attention(pack, policy)})
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = varlen_attention(static, policy)
        for pack in (*packs, packs[0]):
            for x, new in zip(static.tensors(), pack.tensors()):
                if x is not None:
                    x.copy_(new)
            for x in outputs.values():
                x.fill_(float("nan"))
            graph.replay()
            assert_as_alone(pack, {policy: outputs}, "graph replay")


@HEAD_DIMS
@FEW
def test_the_host_does_not_wait(mask, head_dim, device):
    pool = Pool(problem_of(4, 2, head_dim, **FEW_MASKS[mask]), device)
    pack = pack_of_capacity(pool, REPLAYED[0], random.Random(0))
    for policy in everything(pool.problem):
        for _ in range(2):
            varlen_attention(pack, policy)
        with support.host_must_not_wait(f"{pack} {policy}"):
            outputs = varlen_attention(pack, policy)
        assert_as_alone(pack, {policy: outputs})


@HEAD_DIMS
@FEW
def test_workspace_is_linear_in_the_tokens(mask, head_dim, device):
    """fp32 dQ, and dK and dV where query heads are split over work tiles, and where KV tiles are divided; of each
    sequence up to a tile more."""
    heads, kv_heads = 4, 2
    pool = Pool(problem_of(heads, kv_heads, head_dim, **FEW_MASKS[mask]), device)
    for lengths in ([(16384, 16384), *[(64, 64)] * 500], [(4096, 4096)] * 6):
        pack = pack_checks.pack_of_lengths(pool, lengths)
        rows = max(pack.rows_q.total, pack.rows_k.total) + 128 * len(lengths)
        for policy in everything(pool.problem):
            results = sum(x.nbytes for x in varlen_attention(pack, policy).values())
            used = support.requested_bytes(lambda: varlen_attention(pack, policy)) - results
            sums = 2 if policy != "auto" and schedule.divides(policy) else 1
            allowed = 1.05 * 4 * head_dim * rows * (heads + 2 * sums * kv_heads) + (1 << 20)
            assert used <= allowed, f"{pack} {policy}: {used} bytes, {allowed:.0f} allowed"


@pytest.mark.parametrize("mask, head_dim, held", pairwise(FEW_MASKS, (64, 96, 128), (1, 66, 130, 131)), ids=str)
def test_progress_while_sms_are_held(mask, head_dim, held, holder, device, num_sms):
    """Both passes end while another kernel holds SMs, with the same bits. Clusters need two SMs side by side, and may
    wait for the holder where few are left."""
    if held >= num_sms:
        pytest.skip(f"the GPU has {num_sms} SMs")
    pool = Pool(problem_of(8, 2, head_dim, **FEW_MASKS[mask]), device)
    lengths = [(1000, 1000), *[(64, 65), (1, 1), (0, 0), (129, 129)] * 8, (1000, 127), (300, 1000)]
    pack = pack_checks.pack_of_lengths(pool, lengths)
    for policy in everything(pool.problem):
        for _ in range(2):  # loads the kernels, and leaves what they allocate in the allocator's cache
            assert_as_alone(pack, {policy: varlen_attention(pack, policy)})
        end = torch.cuda.Event()
        with holder.hold(held, HOLD_LIMIT_S):
            outputs = varlen_attention(pack, policy)
            end.record()
            while not end.query() and holder.holding():
                time.sleep(1e-4)
            finished = end.query() and holder.holding()
        torch.cuda.synchronize()
        may_wait = support.needs_clusters(policy) and num_sms - held < FREE_SMS_FOR_A_CLUSTER
        assert finished or may_wait, f"{pack} {policy}: no end within {HOLD_LIMIT_S} s while {held} SMs were held"
        assert_as_alone(pack, {policy: outputs}, f"{held} SMs held")


def random_mask(batch: int, seqlen: int, chance: random.Random, device: str) -> torch.Tensor:
    """(batch, seqlen): which tokens are there. Padding on the right, on the left, and anywhere; a row of none."""
    mask = torch.zeros(batch, seqlen, dtype=torch.bool)
    for row in mask[:-1]:
        count, kind = chance.randint(1, seqlen), chance.choice(("right", "left", "anywhere"))
        places = {"right": range(count), "left": range(seqlen - count, seqlen)}
        row[list(places.get(kind, chance.sample(range(seqlen), count)))] = True
    return mask.to(device)


def unpadded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)]


def padded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    result = x.new_zeros((mask.numel(), *x.shape[1:]))
    return result.index_copy(0, mask.flatten().nonzero().squeeze(1), x).unflatten(0, mask.shape)


def cu_seqlens_of(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)


@pytest.mark.parametrize(
    "mask, lengths, head_dim", pairwise(FEW_MASKS, ((200, 200), (130, 300), (300, 130)), (64, 96, 128)), ids=str
)
def test_random_padding(mask, lengths, head_dim, device):
    """The caller unpads and pads again, and autograd goes through both: what each sequence has is what its tokens have
    alone, and padding has zeros."""
    chance = random.Random(str(lengths))
    problem = dataclasses.replace(Problem(6, *lengths, 4, 2, head_dim, causal=False), **FEW_MASKS[mask])
    tensors = support.random_qkv_dout(problem, device)
    mask_q = random_mask(6, lengths[0], chance, device)
    # Keys and queries of the same tokens, or of others; queries without keys in the last but one row.
    mask_k = mask_q if lengths[0] == lengths[1] else random_mask(6, lengths[1], chance, device)
    if mask_k is not mask_q:
        mask_k[-2] = False
    masks = dict(zip("qkv", (mask_q, mask_k, mask_k)))
    for policy in everything(problem):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        packed = [unpadded(x, masks[name]) for name, x in zip("qkv", leaves)]
        arguments = dict(pack_checks.mask_arguments(problem), schedule=policy)
        out = dash_attn.flash_attn_varlen_func(
            *packed, cu_seqlens_of(mask_q), cu_seqlens_of(mask_k), *lengths, **arguments
        )
        out = padded(out, mask_q)
        gradients = dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, tensors[3])))
        assert not out[~mask_q].any() and not gradients["dq"][~mask_q].any()
        assert not gradients["dk"][~mask_k].any() and not gradients["dv"][~mask_k].any()
        for b in range(6):
            own = [x[b, at[b]][None] for x, at in zip(tensors, (mask_q, mask_k, mask_k, mask_q))]
            alone = dataclasses.replace(problem, batch=1, seqlen_q=own[0].shape[1], seqlen_k=own[1].shape[1])
            expected = pack_checks.dense_attention(alone, policy, *own)
            found = {"out": out[b, mask_q[b]], "dq": gradients["dq"][b, mask_q[b]]}
            found |= {name: gradients[name][b, mask_k[b]] for name in ("dk", "dv")}
            expected = {name: expected[name][0] for name in found}
            support.assert_same_bits(found, expected, f"{alone} {policy}, sequence {b} of padded ones")


@EVERY_HEAD_DIMS
@FEW
def test_padding_left_in_place(mask, head_dims, device):
    """Padded tensors as they are, with their lengths in `seqused`: the bits of the pack without padding."""
    options = dict(FEW_MASKS[mask], value_head_dim=head_dims[1])
    problem = dataclasses.replace(Problem(5, 200, 300, 4, 2, head_dims[0], causal=False), **options)
    tensors = support.random_qkv_dout(problem, device)
    used_q, used_k = [200, 0, 17, 129, 1], [300, 65, 300, 0, 128]
    sequences = []
    for b, (seqlen_q, seqlen_k) in enumerate(zip(used_q, used_k)):
        alone = dataclasses.replace(problem, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        sequence = pack_checks.Alone(alone, device, b)
        for name, x, used in zip(("q", "k", "v", "dout"), tensors, (used_q, used_k, used_k, used_q)):
            x[b, used[b] :] = float("nan")
            setattr(sequence, name, x[b, : used[b]])
        sequences.append(sequence)
    rows = [
        pack_checks.Rows(5 * seqlen, tuple(range(0, 5 * seqlen + 1, seqlen)), tuple(used))
        for seqlen, used in ((200, used_q), (300, used_k))
    ]
    pack = make_pack(sequences, *rows)
    pack.q, pack.k, pack.v, pack.dout = (x.flatten(0, 1) for x in tensors)
    for policy in everything(problem):
        assert_as_alone(pack, {policy: varlen_attention(pack, policy)}, "padded")


@HEAD_DIMS
@FEW
def test_packed_tensors(mask, head_dim, device):
    """qkv and kv in one tensor: the bits of three, and the gradient in one tensor too."""
    pool = Pool(problem_of(4, 4, head_dim, **FEW_MASKS[mask]), device)
    lengths = ((129, 129), (0, 0), (1, 1), (300, 300), (65, 65))
    pack = pack_checks.pack_of_lengths(pool, lengths)
    # The same rows for queries and keys.
    pack = make_pack(pack.sequences, pack.rows_q, pack.rows_q)
    cu_seqlens, longest = pack.cu_seqlens_q, pack.max_seqlen_q
    for policy in everything(pool.problem):
        expected = varlen_attention(pack, policy)
        arguments = dict(pack_checks.mask_arguments(pool.problem), schedule=policy)
        qkv = torch.stack((pack.q, pack.k, pack.v), dim=1).requires_grad_()
        out = dash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest, **arguments)
        (gradient,) = torch.autograd.grad(out, qkv, pack.dout)
        found = dict(zip(("out", *GRADIENTS), (out.detach(), *gradient.unbind(1))))
        support.assert_same_bits(found, {name: expected[name] for name in found}, f"{pack} {policy}, qkv in one")
        q = pack.q.detach().requires_grad_()
        kv = torch.stack((pack.k, pack.v), dim=1).requires_grad_()
        out = dash_attn.flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, pack.cu_seqlens_k, longest, pack.max_seqlen_k, **arguments
        )
        dq, dkv = torch.autograd.grad(out, (q, kv), pack.dout)
        found = dict(zip(("out", *GRADIENTS), (out.detach(), dq, *dkv.unbind(1))))
        support.assert_same_bits(found, {name: expected[name] for name in found}, f"{pack} {policy}, kv in one")


@FEW
def test_compiles_to_one_graph_for_all_lengths(mask, device):
    pool = Pool(problem_of(4, 2, 64, **FEW_MASKS[mask]), device)
    arguments = dict(pack_checks.mask_arguments(pool.problem), return_attn_probs=True)

    def step(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k):
        return dash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, **arguments)[
            :2
        ]

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    # Of the first one no two sizes are equal: torch would take them for equal in every call.
    packs = [
        pack_checks.pack_of_lengths(pool, lengths)
        for lengths in (
            ((129, 130), (64, 65), (300, 200), (1, 7), (20, 31)),
            ((65, 300), (1000, 127), (2, 3), (0, 64)),
            ((127, 127), (0, 0), (129, 64), (63, 63), (1000, 1000)),
        )
    ]

    def check(pack: Pack) -> None:
        leaves = [x.detach().requires_grad_() for x in (pack.q, pack.k, pack.v)]
        lengths = pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_seqlen_q, pack.max_seqlen_k
        out, softmax_lse = compiled(*leaves, *lengths)
        gradients = torch.autograd.grad(out, leaves, pack.dout)
        found = dict(zip(pack_checks.OUTPUTS, (out.detach(), softmax_lse.detach(), *gradients)))
        assert_as_alone(pack, {"auto": found}, "compiled")

    check(packs[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for pack in packs[1:]:
            check(pack)


def test_opcheck(device):
    for head_dim, mask in ((64, FEW_MASKS["causal"]), (128, FEW_MASKS["window"])):
        pool = Pool(problem_of(4, 2, head_dim, **mask), device)
        pack = pack_checks.pack_of_lengths(pool, ((70, 129), (0, 0), (130, 65)))
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        arguments = {**pool.problem.op_arguments, **{name: getattr(pack, name) for name in names}}
        torch.library.opcheck(torch.ops.dash_attn.forward.default, (pack.q, pack.k, pack.v), arguments)


WRONG_LENGTHS = {
    "decreasing": ("[0, 200, 100, 300]", "None", "cu_seqlens_q"),
    "beyond the rows": ("[0, 100, 200, 301]", "None", "cu_seqlens_q"),
    "negative": ("[-1, 100, 200, 300]", "None", "cu_seqlens_q"),
    "seqused beyond the place": ("[0, 100, 200, 300]", "[100, 101, 1]", "seqused_q"),
}
CALL_WITH_WRONG_LENGTHS = """
import dash_attn, torch
integers = lambda values: values and torch.tensor(values, dtype=torch.int32, device="cuda")
q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
right = integers([0, 100, 200, 300])
dash_attn.flash_attn_varlen_func(q, k, v, integers({cu_seqlens}), right, 300, 300, seqused_q=integers({seqused}))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
def test_lengths_that_make_no_sense_are_an_error_on_the_device(wrong, device):
    """In a process of its own, which can do no more with the device."""
    cu_seqlens, seqused, argument = WRONG_LENGTHS[wrong]
    program = CALL_WITH_WRONG_LENGTHS.format(cu_seqlens=cu_seqlens, seqused=seqused)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "dash_attn: cu_seqlens_q must" in result.stdout and argument in result.stdout
    assert "CUDA error" in result.stderr
