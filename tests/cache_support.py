"""Caches of keys and values in every form that flash_attn_with_kvcache takes, for its tests on any device."""

import dataclasses

import torch


@dataclasses.dataclass
class Filled:
    """Sequences of keys and values, in a cache with room for more, and how to ask for it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    arguments: dict[str, object]


FORMS = (
    "plain", "strided", "heads_first", "larger", "indexed", "left_padded", "indexed_left_padded", "paged",
    "paged_left_padded", "paged_indexed", "paged_indexed_left_padded",
)  # fmt: skip


def fill(form, keys, values, capacity, *, block_size=16, poison=torch.nan):
    """A cache with these sequences, lists of (length, kv_heads, head_dim), and `poison` wherever there is no key."""
    device, batch = keys[0].device, len(keys)
    lengths = [len(x) for x in keys]

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    arguments = {}
    pads = [(3 * b + 2) % 7 if "left_padded" in form else 0 for b in range(batch)]
    if "left_padded" in form:
        arguments["cache_leftpad"] = int32(pads)
    rows = list(range(batch))
    if "indexed" in form:
        rows = [2 * (batch - 1 - b) for b in range(batch)]
        arguments["cache_batch_idx"] = int32(rows)
    caches = []
    if form.startswith("paged"):
        blocks = -(-(capacity + max(pads)) // block_size)
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).view(batch, blocks) + 1
        table = order.tolist()
        for contents in (keys, values):
            cache = contents[0].new_full((batch * blocks + 2, block_size, *contents[0].shape[1:]), poison)
            for sequence, pad, own in zip(contents, pads, table):
                for i, row in enumerate(sequence, pad):
                    cache[own[i // block_size], i % block_size] = row
            caches.append(cache)
        # Rows that no sequence has name no block.
        arguments["block_table"] = int32([[-1] * blocks] * (max(rows, default=-1) + 1))
        arguments["block_table"][rows] = int32(table)
        return Filled(*caches, arguments | {"cache_seqlens": int32([n + p for n, p in zip(lengths, pads)])})
    for contents in (keys, values):
        heads, head_dim = contents[0].shape[1:]
        sequences = 2 * batch if "indexed" in form or form == "larger" else batch
        if form == "heads_first":
            cache = contents[0].new_full((sequences, heads, capacity + 7, head_dim), poison).transpose(1, 2)
        elif form == "strided":
            cache = contents[0].new_full((sequences, capacity + 19, heads, head_dim), poison)[:, 5 : capacity + 12]
        else:
            cache = contents[0].new_full((sequences, capacity + 7, heads, head_dim), poison)
        for sequence, pad, row in zip(contents, pads, rows):
            cache[row, pad : pad + len(sequence)] = sequence
        caches.append(cache)
    return Filled(*caches, arguments | {"cache_seqlens": int32([n + p for n, p in zip(lengths, pads)])})


def turned(x, positions, factors, interleaved):
    """Rotation by complex numbers in float64. x: (rows, heads, head_dim); positions: (rows,), rows of the complex
    factors."""
    dim = 2 * factors.shape[1]
    pairs = x[..., :dim].double()
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * factors[positions][:, None])
    result = result.flatten(-2) if interleaved else result.transpose(-1, -2).flatten(-2)
    return torch.cat((result, x[..., dim:].double()), dim=-1)
