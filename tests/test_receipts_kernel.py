"""The op behind fingerprints, dash_attn_C::fingerprint_blocks: its C++, which the kernel shares, against torch's.

On the CPU it plays the kernel's launches: the same pieces, strips, lanes and places, for several warps.
"""

import collections
import itertools
import math
import random

import pytest
import torch
from fingerprint_support import DTYPES, random_call, random_tensor, words_in
from receipts_support import Model
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn.receipts import Recorder, Shard, block_sums, fingerprint, torch_sums
from dash_attn.receipts.pieces import pieces_of

OP = torch.ops.dash_attn_C.fingerprint_blocks
# From fewer groups than a warp has lanes to more than a warp takes at once.
BLOCKS = [8, 16, 64, 128, 256, 512, 2048, 4096, 8192, 1 << 18]


def contiguous_piece(number, tensor, *, first=0, sums=0):
    count = words_in(tensor)
    return [number, 0, 1, count, count, first, count, sums]


def both(tensors, pieces, block, sums):
    """The sums, found alike by the op and by torch's operations."""
    found = OP(tensors, pieces, block, sums)
    expected = torch_sums.fingerprint_blocks(tensors, pieces, block, sums)
    assert found.dtype == torch.int64 and torch.equal(found, expected)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_lengths_and_starts(dtype, block):
    """Around the borders of groups, of what a warp loads at once, of strips and of blocks."""
    per = max(1, dtype.itemsize // 4)
    lengths = {1, 7, 8, 9, 257, 1025, 4095, 4097, min(block, 5000) - 1, min(block, 5000) + 1}
    for length, start in itertools.product(sorted(lengths), (0, 1, 250, block - 1, 3 * block + 5)):
        tensor = random_tensor(dtype, -(-length // per), seed=length)
        last = start + words_in(tensor) - 1
        first_block, blocks = start // block, last // block - start // block + 1
        piece = contiguous_piece(0, tensor, first=start, sums=1 - first_block)
        sums = both([tensor], piece, block, blocks + 2)
        assert sums[0] == sums[-1] == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_tensors_that_begin_anywhere(dtype):
    """Views whose memory is aligned to no load of several words, under each place of a group."""
    tensor = random_tensor(dtype, 5000)
    for offset, start in itertools.product(range(17), (0, 1, 4, 7)):
        view = tensor[offset : offset + 2500 - start]
        both([view], contiguous_piece(0, view, first=start), 512, 64)


@pytest.mark.parametrize("block", [8, 64, 1024, 1 << 18])
@pytest.mark.parametrize("seed", range(3))
def test_many_tensors_in_rows(block, seed):
    """More pieces than a launch takes, of all dtypes, some in rows, far out in their whole tensors."""
    tensors, pieces, total = random_call(seed, block, 80, 5000)
    both(tensors, pieces, block, total)


def test_pieces_add_up():
    """Two that meet the same blocks, and one that comes twice."""
    tensor = random_tensor(torch.bfloat16, 3000)
    whole = OP([tensor], contiguous_piece(0, tensor), 1024, 3)
    halves = [0, 0, 1, 1234, 0, 0, 0, 0] + [0, 1234, 1, 3000 - 1234, 0, 1234, 0, 0]
    assert torch.equal(both([tensor], halves, 1024, 3), whole)
    assert torch.equal(both([tensor], halves * 2, 1024, 3), 2 * whole)


def test_nothing_to_do():
    tensor = torch.zeros(0)
    assert OP([tensor], [], 8, 0).shape == (0,)
    assert torch.equal(OP([tensor], [], 8, 3), torch.zeros(3, dtype=torch.int64))


def elements_of(shard):
    """For each element of the part, in its own order, its number in the whole; an independent reading of `Shard`."""
    indices = [[i for start, stop in of_dim for i in range(start, stop)] for of_dim in shard.ranges]
    numbers = []
    for place in itertools.product(*indices):
        number = 0
        for length, index in zip(shard.shape, place):
            number = number * length + index
        numbers.append(number)
    return numbers


def random_shard(rng):
    shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randrange(6))]
    ranges = []
    for length in shape:
        cuts = sorted(rng.sample(range(length + 1), min(length + 1, rng.choice([2, 2, 3, 4]))))
        of_dim = [(0, length)] if rng.random() < 0.5 else [p for p in itertools.pairwise(cuts) if rng.random() < 0.7]
        rng.shuffle(of_dim)
        ranges.append(tuple(of_dim))
    return Shard(tuple(shape), tuple(ranges))


@pytest.mark.parametrize("per", [1, 2, 4])
def test_pieces_of_a_shard(per):
    """Each word of the part is in one piece, with the number that its element has in the whole."""
    rng = random.Random(per)
    for _ in range(400):
        shard = random_shard(rng)
        found = {}
        for piece in pieces_of(shard, per):
            for row, column in itertools.product(range(piece.rows), range(piece.columns)):
                at = piece.offset + row * piece.pitch + column
                assert at not in found
                found[at] = piece.first + row * piece.stride + column
        expected = [number * per + word for number in elements_of(shard) for word in range(per)]
        assert [found[at] for at in sorted(found)] == expected and len(found) == len(expected)


@pytest.mark.parametrize(
    "shard, pieces",
    [
        (Shard.whole((4, 6, 8)), 1),
        (Shard.box((64, 6, 8), (16, 0, 0), (16, 6, 8)), 1),
        (Shard.box((64, 6, 8), (0, 0, 2), (64, 6, 2)), 1),
        (Shard.box((64, 6, 8), (3, 0, 2), (20, 6, 2)), 1),
        (Shard.along((4, 64, 2, 8), 1, (0, 8), (56, 64)), 2),
        (Shard.along((4, 64, 2, 8), 1, (0, 8), (8, 16)), 1),
        (Shard((4, 64, 2, 8), (((0, 4),), ((0, 8), (56, 64)), ((1, 2),), ((0, 8),))), 4 * 2),
    ],
)
def test_a_part_is_few_pieces(shard, pieces):
    assert len(pieces_of(shard, 1)) == pieces


def test_copies_of_tensors_that_are_not_contiguous():
    tensor = random_tensor(torch.float32, 30, 40)
    views = [tensor.t(), tensor[::2], tensor[:, 3:7], tensor.expand(2, 30, 40)]
    for view in views:
        copy = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(block_sums(view, block=64), block_sums(copy, block=64))


class Calls(TorchDispatchMode):
    """Counts the op's calls by the number of their tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is OP.default:
            self.found.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_a_recorder_computes_many_tensors_at_once(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    count = len(list(model.parameters()))
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder, Calls() as calls:
        with recorder.step(0, data=[torch.ones(3), torch.ones(4)]):
            model(torch.zeros(3, 5, dtype=torch.int64)).backward()
            optimizer.step()
    # Data, weights, the tap in the model and its gradient, gradients, then state and weights.
    assert collections.Counter(calls.found) == collections.Counter([2, count, 1, 1, count, 4 * count])


def test_opcheck():
    tensors = [random_tensor(dtype, 300) for dtype in (torch.uint8, torch.bfloat16, torch.float64)]
    pieces = list(itertools.chain.from_iterable(contiguous_piece(i, t, sums=2 * i) for i, t in enumerate(tensors)))
    torch.library.opcheck(OP.default, (tensors, pieces, 512, 6))


PIECE = dict(tensor=0, offset=10, rows=3, columns=20, pitch=30, first=5, stride=50, sums=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(tensor=1), r"tensor of piece 0 must be in \[0, 1\), got 1"),
        (dict(tensor=-1), r"tensor of piece 0 must be in \[0, 1\), got -1"),
        (dict(offset=-1), "offset of piece 0 must be at least 0 and, with columns, within the tensor's 90 words, got"),
        (dict(offset=11), "rows of piece 0 must be within the tensor's 90 words, got 3"),
        (dict(offset=71), "offset of piece 0 must be at least 0 and, with columns, within the tensor's 90 words, got"),
        (dict(rows=0), r"rows of piece 0 must be in \[1, 2\^60\), got 0"),
        (dict(rows=4), "rows of piece 0 must be within the tensor's 90 words, got 4"),
        (dict(columns=0), "columns of piece 0 must be at least 1 and within the tensor's 90 words, got 0"),
        (dict(columns=91, rows=1), "columns of piece 0 must be at least 1 and within the tensor's 90 words, got 91"),
        (dict(pitch=19), "pitch of piece 0 must be at least columns, got 19"),
        (dict(pitch=1 << 62), "rows of piece 0 must be within the tensor's 90 words, got 3"),
        (dict(first=-1), r"first of piece 0 must be at least 0 and, with columns, below 2\^60, got -1"),
        (dict(first=1 << 60), r"first of piece 0 must be at least 0 and, with columns, below 2\^60, got 1152921504"),
        (dict(stride=19), "stride of piece 0 must be at least columns, got 19"),
        (dict(stride=1 << 62), r"stride of piece 0 must be such that words end below 2\^60, got 4611686018427387904"),
        (dict(sums=1), "sums of piece 0 must be such that blocks 0 to 1 are among the 2 sums, got 1"),
        (dict(sums=-1), "sums of piece 0 must be such that blocks 0 to 1 are among the 2 sums, got -1"),
        (dict(sums=-(1 << 63)), "sums of piece 0 must be such that blocks 0 to 1 are among the 2 sums, got -9223"),
    ],
)  # fmt: skip
def test_pieces_that_are_refused(change, message):
    tensor = torch.ones(90)
    assert both([tensor], list(PIECE.values()), 64, 2).shape == (2,)
    with pytest.raises(ValueError, match=message):
        OP([tensor], list((PIECE | change).values()), 64, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([torch.ones(9)], [], 12, 1), "block must be a power of two from 8 to 16777216 words, got 12"),
        (([torch.ones(9)], [0, 0, 1, 9], 8, 2), "pieces must have 8 numbers each, got 4 numbers"),
        (([torch.ones(9)], [], 8, -1), "sums must be at least 0, got -1"),
        (([torch.ones(9), torch.ones(4, 4).t()], [], 8, 1), r"tensors\[1\] must be contiguous"),
    ],
)
def test_calls_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OP(*arguments)


def test_other_devices_have_torch_operations():
    """Meta tensors have no sums but their shape; the CPU and CUDA have C++, what is left the operations of torch."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CPU", "CUDA", "Meta", "CompositeExplicitAutograd"):
        assert has(torch_sums.OP, key)
    assert OP([torch.ones(3, device="meta")], [0, 0, 1, 3, 3, 0, 3, 0], 8, 1).shape == (1,)


def test_fingerprints_wrap():
    """Sums beyond 2^64 in one block and over blocks, of words that are all ones."""
    tensor = torch.full((1 << 16,), -1, dtype=torch.int32)
    sums = both([tensor], contiguous_piece(0, tensor), 1 << 12, 1 << 4)
    total = sum(number % (1 << 64) for number in sums.tolist())
    assert total > 1 << 64 and fingerprint(tensor).item() % (1 << 64) == total % (1 << 64)
    assert math.prod(tensor.shape) == words_in(tensor)
