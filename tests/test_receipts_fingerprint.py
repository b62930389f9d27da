"""The fingerprint against its definition in Python integers, and what it must see: bits, places, parts."""

import itertools
import math
import struct

import pytest
import torch
from fingerprint_support import random_tensor

from dash_attn import receipts
from dash_attn.receipts import Shard, block_sums, fingerprint

MASK = 2**64 - 1
LANE_KEYS = [0x12D687A1, 0xA82C4757, 0x94A1B38F, 0x5EE05AEB, 0x64E2D6A5, 0x7A1FB19D, 0xC64D8B1B, 0xD8E2BC73]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64]
OTHERS = [torch.bool, torch.complex64, torch.complex128]


def mix(group):
    z = (group + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def key(index):
    m = mix(index // 8)
    rotated = (m << 32 | m >> 32) & MASK
    return (m & ~1) + (rotated | 1) * LANE_KEYS[index % 8] & MASK


def expected(data, size, block):
    """Sums of the blocks of bytes that hold elements of a size; an independent reading of the definition."""
    code = {1: "<B", 2: "<H"}.get(size, "<I")
    sums = {}
    for index, (word,) in enumerate(struct.iter_unpack(code, data)):
        sums[index // block] = sums.get(index // block, 0) + word * key(index) & MASK
    return [sums[number] for number in range(len(sums))]


def data_of(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def unsigned(tensor):
    return [number & MASK for number in tensor.reshape(-1).tolist()]


def test_known_answers():
    """Worked out once with the integers above; another number would be another function, under another name."""
    assert receipts.FINGERPRINT == "dash-attn-1"
    assert [mix(0), mix(1)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # splitmix64 of the seed 0
    assert unsigned(fingerprint(torch.tensor([1], dtype=torch.int32))) == [0x564417368C03A887]
    assert unsigned(fingerprint(torch.arange(1, 20, dtype=torch.int16))) == [0xBAB62BEC0B5A1488]
    assert unsigned(fingerprint(torch.tensor([1.0, -2.0], dtype=torch.float64))) == [0x41349A577F300000]
    assert unsigned(block_sums(torch.ones(20, dtype=torch.bfloat16), block=8)) == [
        0x5A8283CFF09FEF00, 0x5D3C1B449DE26500, 0x24949C72DB46D300,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + OTHERS, ids=str)
def test_definition(dtype):
    tensor = random_tensor(dtype, 3, 5, 7)
    size = min(dtype.itemsize, 4) if not dtype.is_complex else 4
    for block in (8, 32, 1024):
        assert unsigned(block_sums(tensor, block=block)) == expected(data_of(tensor), size, block)
    assert unsigned(fingerprint(tensor)) == [sum(expected(data_of(tensor), size, 8)) & MASK]


def test_definition_beyond_a_chunk():
    """Words are worked on 2^20 at a time: of a part that begins within a block and ends within another."""
    start, count = (1 << 20) - 11, (1 << 20) + 30
    tensor = torch.zeros(count, dtype=torch.int32)
    places = [0, 10, 11, 12, count - 1]
    for place in places:
        tensor[place] = 2**31 - 1 - place
    sums = block_sums(tensor, shard=Shard.box((1 << 22,), (start,), (count,)), block=1 << 18)
    wanted = [0] * 6
    for place in places:
        wanted[(start + place >> 18) - 3] += int(tensor[place]) * key(start + place)
    assert unsigned(sums) == [number & MASK for number in wanted]


def test_layout_in_memory_does_not_count():
    tensor = random_tensor(torch.bfloat16, 6, 10, 4)
    assert torch.equal(fingerprint(tensor.transpose(0, 2)), fingerprint(tensor.transpose(0, 2).contiguous()))
    assert torch.equal(fingerprint(tensor[::2, 1::3]), fingerprint(tensor[::2, 1::3].clone()))
    values = torch.complex(torch.randn(3), torch.randn(3))
    assert torch.equal(fingerprint(values.conj()), fingerprint(values.conj().resolve_conj()))


def test_zeros_and_nothing():
    assert fingerprint(torch.zeros(100)).item() == fingerprint(torch.zeros(0)).item() == 0
    assert block_sums(torch.zeros(3, 0)).shape == (0,)
    assert fingerprint(torch.tensor([-0.0])).item() != 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_single_bit_counts(dtype):
    """In its block, and in no other."""
    tensor = random_tensor(dtype, 5, 7)
    before = block_sums(tensor, block=8)
    per = max(1, dtype.itemsize // 4)
    flat = tensor.view(-1).view(torch.uint8)
    for place, bit in itertools.product(range(flat.numel()), range(8)):
        flat[place] ^= 1 << bit
        changed = (block_sums(tensor, block=8) != before).nonzero().flatten().tolist()
        assert changed == [place // dtype.itemsize * per // 8 if per == 1 else place // 4 // 8]
        flat[place] ^= 1 << bit


# What added to words of a group changes neither their sum nor that of their products with LANE_KEYS, with as few words
# as there can be, by the bytes of a word; and one of all eight words.
UNSEEN = {
    1: [-6, -103, 0, -29, 84, 0, 0, 54],
    2: [0, -3447, -4919, 4128, 0, 0, 0, 4238],
    4: [0, -31808689, 22701775, 0, 0, 0, 0, 9106914],
    "all": [19, -8, -18, -10, -20, 11, 19, 7],
}


@pytest.mark.parametrize("change", UNSEEN)
def test_what_is_never_seen(change):
    """docs/receipts.md says so: the same change is unseen in every group, and half of it is seen."""
    added, generator = torch.tensor(UNSEEN[change]), torch.Generator().manual_seed(0)
    least = int(added.abs().max())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        most = (1 << 8 * dtype.itemsize) - 1 - least
        if most <= least:
            continue
        words = torch.randint(least, most, (40, 8), generator=generator)
        before = fingerprint(words.to(dtype))
        for group in range(40):
            whole, half = words.clone(), words.clone()
            whole[group] += added
            half[group, :4] += added[:4]
            assert fingerprint(whole.to(dtype)) == before != fingerprint(half.to(dtype))


def test_fewer_words_are_seen():
    """No change of 2 words of 4 bytes, of 3 of 2 bytes or of 4 of 1 byte keeps both sums: all are tried."""
    assert len({key % 2**32 for key in LANE_KEYS}) == 8  # of two words it would be (x, -x)
    for a, b, c in itertools.combinations(LANE_KEYS, 3):
        least = max(abs(a - b), abs(b - c), abs(c - a)) // math.gcd(a - b, b - c)  # all others are multiples of it
        assert least >= 1 << 16
    values = torch.arange(-255, 256)
    for a, b, c, d in itertools.combinations(LANE_KEYS, 4):
        needed = -(values[:, None] * (a - d) + values * (b - d))
        third = needed // (c - d)
        found = (third * (c - d) == needed) & (third.abs() < 256)
        assert found.sum() == 1 and found[255, 255]  # no change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_places_count(dtype):
    """Elements, rows and groups of 8 that trade places; sums of elements cannot tell these apart."""
    words = random_tensor(dtype, 32, 2)
    found = {fingerprint(words).item(), fingerprint(words.t()).item()}
    pairs = list(itertools.combinations(range(32), 2))
    for first, second in pairs:
        order = list(range(32))
        order[first], order[second] = second, first
        found |= {fingerprint(words[order]).item(), fingerprint(words.t()[:, order]).item()}
    assert len(found) == 2 * len(pairs) + 2
    groups = random_tensor(dtype, 4, 8)
    assert len({fingerprint(groups[list(order)]).item() for order in itertools.permutations(range(4))}) == 24
    one_hot = torch.eye(16, dtype=dtype)
    assert len({fingerprint(one_hot.roll(shift, 0)).item() for shift in range(16)}) == 16


def test_pairs_of_high_bits_count():
    """Where a product by a key keeps the least of a difference: signs of two elements."""
    zeros = torch.zeros(64)
    found = set()
    for pair in itertools.combinations(range(64), 2):
        tensor = zeros.clone()
        tensor[list(pair)] = -0.0
        found.add(fingerprint(tensor).item())
    assert len(found) == 64 * 63 // 2 and 0 not in found


PARTS = {
    "rows": [Shard.along((6, 10, 4), 0, (0, 1)), Shard.along((6, 10, 4), 0, (1, 6))],
    "columns": [Shard.along((6, 10, 4), -1, (0, 3)), Shard.along((6, 10, 4), 2, (3, 4))],
    "zigzag": [Shard.along((6, 10, 4), 1, (0, 2), (8, 10)), Shard.along((6, 10, 4), 1, (2, 5), (5, 8))],
    "out of order": [Shard.along((6, 10, 4), 1, (7, 10), (0, 2)), Shard.along((6, 10, 4), 1, (2, 7))],
    "boxes": [
        Shard.box((6, 10, 4), offset, lengths)
        for offset, lengths in [
            ((0, 0, 0), (3, 7, 4)), ((0, 7, 0), (3, 3, 4)), ((3, 0, 0), (3, 10, 1)), ((3, 0, 1), (3, 10, 3)),
            ((9, 9, 9), (0, 10, 4)),
        ]
    ],
}  # fmt: skip


def cut(tensor, shard):
    for dim, of_dim in enumerate(shard.ranges):
        index = torch.cat([torch.arange(start, stop) for start, stop in of_dim])
        tensor = tensor.index_select(dim, index)
    return tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_parts_add_up(name, dtype):
    tensor = random_tensor(dtype, 6, 10, 4)
    whole = torch.tensor(0)
    for shard in PARTS[name]:
        part = cut(tensor, shard)
        assert part.shape == shard.local_shape
        whole = whole + fingerprint(part, shard=shard)
    assert torch.equal(whole, fingerprint(tensor))


@pytest.mark.parametrize("name", ["zigzag", "columns"])
def test_blocks_of_parts(name):
    """Each part's sums are those of its own words, in the whole's numbering."""
    tensor = random_tensor(torch.int16, 6, 10, 4)
    for shard in PARTS[name]:
        numbers = cut(torch.arange(240).view(6, 10, 4), shard).reshape(-1).tolist()
        sums = {}
        for number, word in zip(numbers, cut(tensor, shard).reshape(-1).tolist()):
            sums[number // 16] = sums.get(number // 16, 0) + (word & 0xFFFF) * key(number) & MASK
        first, last = min(sums), max(sums)
        wanted = [sums.get(number, 0) for number in range(first, last + 1)]
        assert unsigned(block_sums(cut(tensor, shard), shard=shard, block=16)) == wanted


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: block_sums(torch.ones(4), block=12), "block must be a power of two from 8 to 16777216 words, got 12"),
        (lambda: block_sums(torch.ones(4), block=4), "block must be a power of two"),
        (lambda: block_sums(torch.ones(4), shard=Shard.box((8,), (0,), (5,))), "shard must have the tensor's"),
        (lambda: Shard.box((8,), (4,), (5,)), r"ranges of dimension 0 must lie within 0 to 8, got \(4, 9\)"),
        (lambda: Shard.along((8,), 0, (0, 3), (2, 4)), r"must not overlap, got \(0, 3\) and \(2, 4\)"),
        (lambda: Shard.along((8,), 1, (0, 3)), r"dim must be a dimension of the shape \(8,\), got 1"),
        (lambda: Shard((8, 2), (((0, 8),),)), "an entry for each dimension"),
        (lambda: Shard.box((8,), (4, 2), (5,)), "must have the same length"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, device="meta"), torch.ones(3).to_sparse(), [1.0]], ids=["meta", "sparse", "list"]
)
def test_what_is_no_dense_tensor(tensor):
    with pytest.raises(TypeError, match="tensor must be"):
        fingerprint(tensor)
