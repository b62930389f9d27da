"""The random bits of dropout: known answers, what a bit depends on, where it lies, and statistics."""

import itertools
import math

import pytest
import torch
from dropout_statistics import CHANCE, correlation_error, rate_errors

from dash_attn import _schedule
from dash_attn.dropout import MAPPINGS, ROUNDS, DropoutState, dropout_bits, keep_probability

# Counter, key and result: tests/kat_vectors of Random123 (D. E. Shaw Research).
ZEROS, ONES = [0] * 4, [0xFFFFFFFF] * 4
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
KNOWN_ANSWERS = [
    (7, ZEROS, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, ONES, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, *PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, ZEROS, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, ONES, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEED = 0x0123456789ABCDEF
SMALL = {"batch": 1, "heads": 1, "seqlen_q": 64, "seqlen_k": 64}
MODES = [("bit_sliced", 7), ("bit_sliced", 10), ("flash_attention_2", 7)]


def mask(state, **arguments):
    return dropout_bits(state, **{"p": 0.25, **SMALL, **arguments}).mask()


@pytest.mark.parametrize("rounds, counter, key, expected", KNOWN_ANSWERS)
def test_philox_known_answers(rounds, counter, key, expected):
    assert _schedule.philox4x32(counter, key, rounds=rounds) == tuple(int(word, 16) for word in expected.split())


@pytest.mark.parametrize("rounds, words", [
    (7, [0xFFEFE7FF, 0x7FDFFBFD, 0xFDFFBFEF, 0xDFFFBEFB]), (10, [0xFFFFDFFF, 0x7FF7FF5F, 0xFF9FFFFD, 0xFD7EFFF3])
])  # fmt: skip
def test_words_of_the_bit_sliced_mapping(rounds, words):
    """They were had from another implementation, in NumPy, of the definition."""
    p = 0.1
    assert keep_probability(p) == 230 / 256
    bits = dropout_bits(DropoutState.of(SEED), p=p, **{**SMALL, "rounds": rounds}).bits
    assert bits[0, 0, 0, 0, :16].view(torch.int32).tolist() == [w - 2**32 if w >= 2**31 else w for w in words]


def flash_attention_2_byte(seed, offset, head_number, query, key):
    """The random number of one element as FlashAttention-2's sources say it, one call of Philox for each element."""
    lane = 4 * (query % 8) + key % 8 // 2
    first = (offset + 32 * head_number + lane) % 2**64
    counter = [first % 2**32, first >> 32, query // 16, key // 32]
    words = _schedule.philox4x32(counter, [seed % 2**32, seed >> 32], rounds=7)
    place = 8 * (key % 32 // 16) + 4 * (key % 16 // 8) + 2 * (query % 16 // 8) + key % 2
    return words[place // 4] >> 8 * (place % 4) & 0xFF


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 1e-3])
def test_flash_attention_2_mapping_is_that_of_its_sources(p):
    seed, offset = 2**64 - 12345, 2**32 - 70  # so that the offset carries into its high word
    sizes = {"batch": 2, "heads": 3, "seqlen_q": 40, "seqlen_k": 70}
    kept = mask(DropoutState.of(seed, offset), p=p, mapping="flash_attention_2", **sizes)
    most = math.floor(255 * (torch.tensor(1.0) - torch.tensor(p)).item())
    for b, h, i, j in itertools.product(range(2), range(3), range(0, 40, 3), range(0, 70, 3)):
        assert kept[b, h, i, j] == (flash_attention_2_byte(seed, offset, 3 * b + h, i, j) <= most), (b, h, i, j)


@pytest.mark.parametrize("mapping, rounds", MODES)
def test_the_bits_are_the_function_of_one_element(mapping, rounds):
    state, sizes = DropoutState.of(SEED, 77), {"batch": 2, "heads": 2, "seqlen_q": 33, "seqlen_k": 65}
    kept = mask(state, mapping=mapping, rounds=rounds, **sizes)
    arguments = {"p": 0.25, "total_heads": 2, "mapping": mapping, "rounds": rounds}
    for b, h, i, j in itertools.product(range(2), range(2), range(33), range(65)):
        alone = _schedule.dropout_keeps(SEED, 77, sequence=b, head=h, query=i, key=j, **arguments)
        assert kept[b, h, i, j] == alone, (b, h, i, j)


@pytest.mark.parametrize("mapping, rounds", MODES)
def test_a_part_has_the_bits_of_the_whole(mapping, rounds):
    """Shards of heads, queries and keys, and lengths that are cut short."""
    state, mode = DropoutState.of(SEED, 5), {"mapping": mapping, "rounds": rounds}
    whole = mask(state, batch=2, heads=4, seqlen_q=128, seqlen_k=160, **mode)
    shard = {"heads": 2, "first_head": 1, "total_heads": 4, "first_query": 32, "first_key": 64}
    part = mask(state, batch=2, seqlen_q=50, seqlen_k=45, **shard, **mode)
    assert torch.equal(part, whole[:, 1:3, 32:82, 64:109])


@pytest.mark.parametrize("mapping, rounds", MODES)
def test_a_sequence_with_its_own_state_has_the_mask_that_it_has_alone(mapping, rounds):
    mode = {"heads": 2, "mapping": mapping, "rounds": rounds}
    states = DropoutState(torch.randint(2**62, (3, 2), generator=torch.Generator().manual_seed(1)))
    together = mask(states, batch=3, **mode)
    for b in range(3):
        alone = mask(DropoutState(states.rng_state[b]), **mode)
        assert torch.equal(together[b : b + 1], alone)
        assert torch.equal(mask(DropoutState(states.rng_state[b : b + 1]), **mode), alone)
    assert not torch.equal(together[0], together[1])


def test_everything_that_a_bit_depends_on_changes_it():
    base = {"seed": 11, "offset": 2**33 + 5, "rounds": 7, "mapping": "bit_sliced", "p": 0.5}
    changes = [{"seed": 12}, {"seed": 11 + 2**32}, {"offset": 2**33 + 6}, {"offset": 2**34 + 5}, {"rounds": 10}]
    changes += [{"mapping": "flash_attention_2"}]

    def made(seed, offset, **arguments):
        return mask(DropoutState.of(seed, offset), **arguments)

    for change in changes:
        different = (made(**base) != made(**{**base, **change})).sum().item()
        assert 0.4 * 64**2 < different < 0.6 * 64**2, change


def test_planes_that_cannot_matter_change_nothing():
    """Where 16 divides the threshold half of the random numbers are not made: the others decide alone."""
    kept = {}
    for t in (127, 128, 129):
        p = 1 - (t - 0.5) / 255
        assert keep_probability(p) == t / 256
        kept[t] = mask(DropoutState.of(9), p=p, seqlen_q=512, seqlen_k=512)
    # A larger threshold keeps what a smaller one keeps, and 1/256 of the elements besides.
    for less, more in ((127, 128), (128, 129)):
        assert (kept[more] | ~kept[less]).all() and (kept[more] & ~kept[less]).any()


@pytest.mark.parametrize("mapping, rounds", MODES)
def test_every_probability(mapping, rounds):
    for t in range(1, 257):
        p = 0.0 if t == 256 else 1 - (t - 0.5) / 255
        assert keep_probability(p) == t / 256
        kept = mask(DropoutState.of(t), p=p, seqlen_q=256, seqlen_k=256, mapping=mapping, rounds=rounds)
        assert rate_errors(kept, t / 256, (0, 1, 2, 3), CHANCE / 256) <= 1, t


def test_probability_zero_keeps_all():
    assert mask(DropoutState.of(1), p=0.0).all() and mask(DropoutState.of(1), p=0.0, mapping=MAPPINGS[1]).all()


LAGS = (1, 2, 8, 16, 32, 64, 128)
SIZES = {"batch": 3, "heads": 4, "seqlen_q": 384, "seqlen_k": 384}


def correlations(kept, other_states):
    """Pairs of masks that should be independent: shifted along each dimension, and of neighbouring states."""
    pairs = {}
    for lag in LAGS:
        pairs[f"queries {lag}"] = kept[:, :, lag:], kept[:, :, :-lag]
        pairs[f"keys {lag}"] = kept[..., lag:], kept[..., :-lag]
    pairs["diagonal"] = kept[:, :, 1:, 1:], kept[:, :, :-1, :-1]
    pairs["heads"] = kept[:, 1:], kept[:, :-1]
    pairs["sequences"] = kept[1:], kept[:-1]
    for name, other in other_states.items():
        pairs[name] = kept, other
    return pairs


def worst(generate, p):
    """The largest of all statistics of masks, in units of what chance allows them."""
    rate = keep_probability(p)
    kept = generate(SEED, 1)
    neighbours = {"seed": (SEED + 1, 1), "high seed": (SEED + 2**32, 1), "offset": (SEED, 2), "FA2's": (SEED, 1 + 384)}
    pairs = correlations(kept, {name: generate(*numbers) for name, numbers in neighbours.items()})
    sums = [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3), (0, 3)]  # all, each key, each query, each head, a head's rows
    count = len(sums) + len(pairs)
    errors = {f"rate over {dims}": rate_errors(kept, rate, dims, CHANCE / count) for dims in sums}
    errors |= {name: correlation_error(*pair, rate, CHANCE / count) for name, pair in pairs.items()}
    name = max(errors, key=errors.get)
    return errors[name], name


@pytest.mark.parametrize("p", [0.1, 0.125, 0.5])
@pytest.mark.parametrize("mapping, rounds", MODES)
def test_statistics(mapping, rounds, p):
    error, name = worst(lambda *state: mask(DropoutState.of(*state), p=p, mapping=mapping, rounds=rounds, **SIZES), p)
    assert error <= 1, name


@pytest.mark.parametrize("rounds", [3, 5])
def test_statistics_tell_too_few_rounds(rounds):
    """What the public function refuses: the test above can fail."""
    assert rounds not in ROUNDS
    b, h, n = SIZES["batch"], SIZES["heads"], SIZES["seqlen_q"]

    def generate(seed, offset):
        whole = dropout_bits(DropoutState.of(seed, offset), p=0.125, **SIZES)
        place = {"heads": h, "seqlen_q": n, "seqlen_k": n, "first_head": 0, "total_heads": h, "first_query": 0}
        place |= {"first_key": 0, "mapping": "bit_sliced", "rounds": rounds}
        for number in range(b):
            made = _schedule.dropout_bits(seed, offset, p=0.125, sequence=number, **place)
            whole.bits[number] = torch.frombuffer(made, dtype=torch.uint8).view_as(whole.bits[number])
        return whole.mask()

    assert worst(generate, 0.125)[0] > 1


def test_patterns_of_eight_keys():
    """Each of the 256 patterns of a query's 8 neighbouring keys comes as often as it should."""
    kept = mask(DropoutState.of(4), p=0.5, seqlen_q=1024, seqlen_k=1024)
    assert keep_probability(0.5) == 0.5
    patterns = (kept.view(-1, 8) * 2 ** torch.arange(8)).sum(dim=1)
    of_pattern = patterns[:, None] == torch.arange(256)
    assert rate_errors(of_pattern, 1 / 256, (0,), CHANCE) <= 1
