"""Tensors of random bytes, and random calls of the op behind fingerprints."""

import math
import random

import torch

DTYPES = [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int16, torch.float32, torch.int64,
          torch.complex64, torch.complex128]  # fmt: skip


def random_tensor(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = dtype.itemsize * math.prod(shape)
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def words_in(tensor):
    return tensor.numel() * max(1, tensor.dtype.itemsize // 4)


def random_call(seed, block, count, elements):
    """Tensors, pieces in rows of at most about `elements` elements that begin anywhere, and how many sums they have."""
    rng = random.Random(f"{seed} {block}")
    tensors, pieces, total = [], [], 0
    for number in range(count):
        dtype = rng.choice(DTYPES)
        per = max(1, dtype.itemsize // 4)
        rows = rng.choice([1, 1, 2, 3, 17])
        columns = rng.choice([1, 3, 8, 31, 64, 500, 5000, elements // rows])
        pitch = columns + rng.choice([0, 1, 8, 40])
        tensor = random_tensor(dtype, rows * pitch + rng.randrange(20), seed=number)
        words, step = columns * per, pitch * per
        offset = rng.randrange(words_in(tensor) - ((rows - 1) * step + words) + 1)
        stride = words + rng.choice([0, 1, 8, 4096, 12345])
        # Beyond what 32 bits count, and what 53 do.
        first = rng.choice([0, rng.randrange(10000), rng.randrange(1 << 45), rng.randrange(1 << 58)])
        last = first + (rows - 1) * stride + words - 1
        tensors.append(tensor)
        pieces += [number, offset, rows, words, step, first, stride, total - first // block]
        total += last // block - first // block + 1
    return tensors, pieces, total
