"""Other work for the GPU while a test runs: products and copies of random sizes on a stream of their own."""

import random

import torch


class Perturbation:
    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._source = torch.randn(32 << 20, device="cuda")
        self._target = torch.empty_like(self._source)
        self._kept = None
        torch.cuda.synchronize()

    def enqueue(self, kernels: int) -> None:
        """Queues kernels that run beside what the caller launches next."""
        with torch.cuda.stream(self._stream):
            for _ in range(kernels):
                if self._random.random() < 0.5:
                    m, n, k = (64 * self._random.randint(1, 64) for _ in range(3))
                    torch.mm(self._matrix[:m, :k], self._matrix[:k, :n])
                else:
                    count = self._random.randint(1 << 10, self._source.numel())
                    self._target[:count].copy_(self._source[:count])

    def move_allocations(self) -> None:
        """Makes the allocator hand the next caller other addresses, full of other bits."""
        sizes = [self._random.randint(1 << 10, 8 << 20) for _ in range(3)]
        self._kept = [torch.full((n,), float("nan"), device="cuda") for n in sizes]

    def stop(self) -> None:
        self._stream.synchronize()
