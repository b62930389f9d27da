"""The fingerprint kernel: the sums of the CPU bit by bit, in graphs, on streams, and nothing read or written beside."""

import itertools

import pytest
import torch
from fingerprint_support import DTYPES, random_call, random_tensor

from dash_attn.receipts import Shard, block_sums
from dash_attn.receipts.fingerprints import sums_of_parts

OP = torch.ops.dash_attn_C.fingerprint_blocks
BLOCKS = [8, 64, 256, 1024, 4096, 1 << 18]


def test_the_kernel_is_what_runs():
    """Not torch's operations, which serve devices without one."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("dash_attn_C::fingerprint_blocks", "CUDA")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        block_sums(torch.ones(1000, device="cuda"))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("fingerprint_kernel" in name for name in names), names


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seed", range(4))
def test_many_tensors(seed, block):
    """Of all dtypes, lengths and alignments, more than one launch takes."""
    tensors, pieces, total = random_call(seed, block, 200, 40000)
    expected = OP(tensors, pieces, block, total)
    found = OP([tensor.cuda() for tensor in tensors], pieces, block, total)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_that_begin_anywhere(dtype):
    """Of memory whose other bytes are not zero: what is read beside the view would show."""
    tensor = random_tensor(dtype, 20000)
    on_gpu = tensor.cuda()
    for offset, start, length in itertools.product(range(17), range(9), (1, 7, 100, 9000)):
        shard = Shard.box((1 << 20,), (start,), (length,))
        views = (x[offset : offset + length] for x in (tensor, on_gpu))
        expected, found = (block_sums(view, shard=shard, block=1024) for view in views)
        assert torch.equal(found.cpu(), expected), (offset, start, length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_tensors_that_are_not_contiguous(dtype):
    tensor = random_tensor(dtype, 60, 70, 9)
    for view_of in (
        lambda x: x.transpose(0, 2), lambda x: x[::2, 1::3], lambda x: x[:, :, 3], lambda x: x.expand(2, 60, 70, 9),
        lambda x: x.conj(), lambda x: x[7],
    ):  # fmt: skip
        view = view_of(tensor.cuda())
        # From the GPU: there a NaN whose sign is turned, as in a conjugate, has other bits.
        expected = block_sums(view.resolve_conj().cpu(), block=256)
        assert torch.equal(block_sums(view, block=256).cpu(), expected)


def test_parts_of_tensors_at_once():
    """Of several devices and shards in one call, in the order in which they were given."""
    whole = random_tensor(torch.bfloat16, 64, 48, 40)
    shards = [
        Shard.whole(whole.shape), Shard.box(whole.shape, (8, 0, 0), (8, 48, 40)), Shard.along(whole.shape, 2, (3, 17)),
        Shard.along(whole.shape, 1, (0, 5), (43, 48)), Shard.box(whole.shape, (0, 4, 8), (64, 9, 16)),
        Shard.along(whole.shape, 0, (5, 5)),
    ]  # fmt: skip
    parts = []
    for shard in shards:
        part = whole
        for dim, of_dim in enumerate(shard.ranges):
            part = part.index_select(dim, torch.cat([torch.arange(start, stop) for start, stop in of_dim]))
        parts.append((part, shard))
    expected = sums_of_parts(parts, 512)
    mixed = [(part if number % 3 == 1 else part.cuda(), shard) for number, (part, shard) in enumerate(parts)]
    for (tensor, _), one, other in zip(mixed, sums_of_parts(mixed, 512), expected):
        assert one.device == tensor.device and torch.equal(one.cpu(), other)


def test_a_tensor_beyond_32_bits():
    """Of more than 2^32 words, where only a few are not zero."""
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of memory")
    count = (1 << 32) + 5000
    tensor = torch.zeros(count, dtype=torch.uint8, device="cuda")
    places = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, count - 1]
    for place in places:
        tensor[place] = 1 + place % 200
    found = block_sums(tensor, block=1 << 24).cpu()
    expected = torch.zeros_like(found)
    for place in places:
        word = torch.tensor([1 + place % 200], dtype=torch.uint8)
        shard = Shard.box((count,), (place,), (1,))
        expected[place >> 24] += block_sums(word, shard=shard, block=1 << 24)[0]
    assert torch.equal(found, expected)


def test_capture_and_replay():
    """A graph has in it what the launches were told, and reads the tensors anew each time."""
    tensors, pieces, total = random_call(7, 1024, 150, 40000)
    on_gpu = [tensor.cuda() for tensor in tensors]
    OP(on_gpu, pieces, 1024, total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = OP(on_gpu, pieces, 1024, total)
    for _ in range(3):
        # The same bytes in another order.
        for tensor, target in zip(tensors, on_gpu):
            of_bytes = tensor.view(torch.uint8)
            of_bytes.copy_(of_bytes.flip(0))
            target.copy_(tensor)
        found.fill_(-1)
        graph.replay()
        graph.replay()
        assert torch.equal(found.cpu(), OP(tensors, pieces, 1024, total))


def test_a_stream_of_its_own():
    """The kernel and the clearing of its sums are on the current stream, behind what makes the tensor."""
    tensor = random_tensor(torch.float32, 1 << 22)
    expected = block_sums(tensor)
    pinned, target = tensor.pin_memory(), torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        target.copy_(pinned, non_blocking=True)
        found = block_sums(target)
    stream.synchronize()
    assert torch.equal(found.cpu(), expected)


def test_repeats_under_load():
    """Atomics come in any order; the sums do not."""
    tensors, pieces, total = random_call(3, 256, 100, 40000)
    on_gpu = [tensor.cuda() for tensor in tensors]
    expected = OP(tensors, pieces, 256, total)
    other, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            load = (load @ load).clamp(-1, 1)
        assert torch.equal(OP(on_gpu, pieces, 256, total).cpu(), expected)
    torch.cuda.synchronize()


def test_opcheck():
    tensors = [random_tensor(dtype, 300).cuda() for dtype in (torch.uint8, torch.bfloat16, torch.float64)]
    pieces = [number for i, words in enumerate((300, 300, 600)) for number in (i, 0, 1, words, words, 0, words, 2 * i)]
    torch.library.opcheck(OP.default, (tensors, pieces, 512, 6))


def test_calls_that_are_refused():
    tensor = torch.ones(90, device="cuda")
    with pytest.raises(
        ValueError, match="columns of piece 0 must be at least 1 and within the tensor's 90 words, got 91"
    ):
        OP([tensor], [0, 0, 1, 91, 91, 0, 91, 0], 64, 2)
    with pytest.raises(ValueError, match=r"tensors\[1\] must be contiguous"):
        OP([tensor, torch.ones(4, 4, device="cuda").t()], [], 64, 2)
    with pytest.raises(ValueError, match=r"tensors\[1\] must be on cuda:0, as others are"):
        OP([tensor, torch.ones(4)], [], 64, 2)
