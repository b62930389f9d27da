"""Receipts on a GPU: the fingerprints of the CPU, and no call that waits for the GPU."""

import pytest
import torch
from receipts_support import make

from dash_attn.receipts import Recorder, Shard, block_sums, compare, tap


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_fingerprint_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    count = 1500 * 1001
    tensor = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    tensor = tensor.view(1500, 1001)
    for shard in (None, Shard.along(tensor.shape, 0, (0, 1500)), Shard.along((1500, 2002), 1, (7, 508), (900, 1400))):
        expected = block_sums(tensor, shard=shard, block=1 << 12)
        assert torch.equal(block_sums(tensor.cuda(), shard=shard, block=1 << 12).cpu(), expected)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.equal(block_sums(tensor.cuda(), shard=shard, block=1 << 12).cpu(), expected)
        finally:
            torch.use_deterministic_algorithms(False)


def test_nothing_waits(tmp_path):
    for run in ("a", "b"):
        model = make()[0].cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        tokens = torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(0)).cuda()
        with Recorder(tmp_path / run, model=model, optimizer=optimizer, taps=["layers.*"]) as recorder:
            for step in range(3):
                # In the first step torch itself may wait, while it sets libraries up.
                torch.cuda.set_sync_debug_mode("error" if step else "default")
                try:
                    with recorder.step(step, data=tokens):
                        tap(model(tokens), "loss").backward()
                        optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                optimizer.zero_grad()
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.first is None and found.steps == [0, 1, 2] and not found.not_compared


def test_a_tap_on_another_stream(tmp_path):
    """The step ends on a stream that has not waited for the one on which a tensor was recorded."""
    side, delay = torch.cuda.Stream(), 200_000_000  # cycles, about a tenth of a second
    for run, late in (("a", True), ("b", False)):
        with Recorder(tmp_path / run) as recorder:
            for step in range(3):
                with recorder.step(step), torch.cuda.stream(side):
                    if late:
                        torch.cuda._sleep(delay)
                    tap(torch.arange(1 << 20, device="cuda") + step, "x")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.first is None and found.steps == [0, 1, 2]
