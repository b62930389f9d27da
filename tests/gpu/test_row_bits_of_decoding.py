"""100,000 rows of one head each, of random rollouts over a KV cache: all have the bits of training's forward."""

import decoding_checks

CASES = 100_000


def test_rows_have_the_bits_of_training(device):
    rollouts = list(decoding_checks.rollouts(decoding_checks.COUNT, decoding_checks.ON_GPU))
    assert sum(rollout.cases for rollout in rollouts) >= CASES
    found = [decoding_checks.failure(rollout, device) for rollout in rollouts]
    wrong = [line for line in found if line]
    assert not wrong, f"{len(wrong)} of {len(rollouts)} rollouts differ, the first few:\n" + "\n".join(wrong[:5])
