"""Which bits a thread gathers for its elements: csrc/dropout/fragment.h, which the kernels compile."""

import numpy as np
import pytest
import torch

from dash_attn import _schedule as compiled
from dash_attn.dropout import layout


def element_of(thread, register):
    """(row, column) in a 64 x N wgmma accumulator: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"."""
    warp, lane = divmod(thread, 32)
    block, within = divmod(register, 4)
    return 16 * warp + lane // 4 + 8 * (within // 2), 8 * block + 2 * (lane % 4) + within % 2


def random_bits(seqlen_q, seqlen_k):
    shape = layout.shape_of(1, 1, seqlen_q, seqlen_k)
    return torch.from_numpy(np.random.default_rng(seqlen_q).integers(0, 256, shape, dtype=np.uint8))


# Whether queries are the rows, and the columns: of the forward, of the backward, and of the backward of wide heads.
@pytest.mark.parametrize("queries_are_rows, columns", [
    (True, 128), (True, 96), (True, 80), (False, 64), (False, 80), (False, 128),
])  # fmt: skip
def test_every_thread_has_its_elements_bits(queries_are_rows, columns):
    seqlen_q, seqlen_k = 5 * 80 + 3, 4 * 128 + 37
    bits = random_bits(seqlen_q, seqlen_k)
    q_blocks, k_blocks = bits.shape[2:4]
    kept = layout.unpack(bits, 32 * q_blocks, 32 * k_blocks)[0, 0]
    if not queries_are_rows:
        kept = kept.T
    rows, width = kept.shape
    for first_row in (0, 64, 192):
        for first_column in (0, columns, 2 * columns, (width // columns) * columns):
            for thread in range(128):
                found = compiled.dropout_kept_registers(
                    bits.numpy().tobytes(), queries_are_rows=queries_are_rows, columns=columns, key_blocks=k_blocks,
                    first_row=first_row, first_column=first_column, thread=thread,
                )  # fmt: skip
                assert len(found) == columns // 2
                for register, is_kept in enumerate(found):
                    row, column = element_of(thread, register)
                    row, column = first_row + row, first_column + column
                    # Nothing is kept where nothing is.
                    assert is_kept == (row < rows and column < width and bool(kept[row, column])), (thread, register)


def test_tiles_that_drop_begin_at_whole_blocks():
    """Heads are not packed, and every query tile begins at a multiple of its rows."""
    for heads, seqlen_q in ((8, 7), (8, 1000), (32, 333)):
        call = dict(batch=2, seqlen_q=seqlen_q, seqlen_k=500, heads=heads, kv_heads=1, causal=True, sms=132)
        for head_dim in (64, 128, 256):
            tiles = compiled.ForwardTiles(**call, head_dim=head_dim, drops=True)
            assert tiles.head_groups == heads
            rows = tiles.tile_positions
            assert rows % 64 == 0 and rows <= compiled.forward_tile_shape(head_dim)[0]
            assert [tiles.positions(i)[0] for i in range(tiles.query_tiles)] == list(range(0, seqlen_q, rows))
