"""Other work for the GPUs (or the CPU) in bursts, until it is killed: a load that runs must not be affected by.

The load allocates, fills and frees memory, copies to the host and multiplies matrices, on two streams of every GPU.

    python examples/training/load.py
"""

import itertools
import random
import time

import torch


def burst(device: torch.device, rows: int) -> None:
    """Multiplies matrices of random sizes, and copies to the host and back."""
    x = torch.randn(rows, random.randint(rows // 8, rows), device=device, dtype=torch.bfloat16)
    for _ in range(random.randint(1, 20)):
        y = x @ x.T
    y.cpu().to(device)
    del x, y
    if random.random() < 0.2 and device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    count = torch.cuda.device_count()
    if not count:
        while True:
            burst(torch.device("cpu"), 256)
    streams = [torch.cuda.Stream(gpu) for gpu in range(count) for _ in range(2)]
    for stream in itertools.cycle(streams):
        with torch.cuda.stream(stream):
            burst(stream.device, 8192)
        time.sleep(random.random() / 100)


if __name__ == "__main__":
    main()
