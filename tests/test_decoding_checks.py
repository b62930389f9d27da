"""The check of rollouts that a GPU test rests on, tried on the CPU: right rows pass, and one wrong bit fails."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import decoding_checks
import gpu_support as support
from decoding_checks import ON_CPU, ON_GPU


def test_rows_have_the_bits_of_training():
    for rollout in decoding_checks.rollouts(60, ON_CPU):
        assert decoding_checks.failure(rollout, "cpu") is None


@pytest.mark.parametrize("output", ["out", "softmax_lse"])
@pytest.mark.parametrize("whose", ["training", "decoding"])
def test_one_wrong_bit_is_seen(whose, output, monkeypatch):
    name = "_attend" if whose == "decoding" else "training"
    original = getattr(decoding_checks, name)

    def wrong(*arguments):
        results = original(*arguments)
        x = results[output == "softmax_lse"]
        support.int_view(x)[(-1,) * x.dim()] ^= 1
        return results

    monkeypatch.setattr(decoding_checks, name, wrong)
    for rollout in decoding_checks.rollouts(10, ON_CPU):
        assert "calls differ, the first in 1 elements" in decoding_checks.failure(rollout, "cpu")


def test_the_cases_of_the_gpu_test():
    """They are many, and every value of a parameter occurs among them."""
    rollouts = list(decoding_checks.rollouts(decoding_checks.COUNT, ON_GPU))
    assert sum(rollout.cases for rollout in rollouts) >= 100_000
    assert {rollout.page_size for rollout in rollouts} == set(decoding_checks.PAGE_SIZES)
    assert {rollout.head_dims for rollout in rollouts} == set(decoding_checks.HEAD_DIMS)
    assert {(rollout.heads, rollout.kv_heads) for rollout in rollouts} == set(decoding_checks.HEADS)
    assert {rollout.window_left for rollout in rollouts} == set(decoding_checks.WINDOWS)
    assert {rollout.attention_chunk for rollout in rollouts} == set(decoding_checks.ATTENTION_CHUNKS)
    calls = [call for rollout in rollouts for call in rollout.calls]
    counts = {count for call in calls for count in call.counts}
    assert counts.issuperset(range(1, decoding_checks.MOST_NEW + 1)) and max(counts) > 1000
    kinds = {(call.is_dense, call.appends, call.causal, call.has_batch_idx) for call in calls}
    assert len(kinds) == 16
    assert {len(rollout.lengths) for rollout in rollouts} == set(range(1, ON_GPU.most_sequences + 1))
    for rollout in rollouts:
        done = [0] + [rollout.shared] * (len(rollout.lengths) - 1)
        for call in rollout.calls:
            for b, count in zip(call.sequences, call.counts, strict=True):
                done[b] += count
        assert tuple(done) == rollout.lengths
