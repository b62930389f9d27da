"""The forward kernels for short query tiles on the host (emulation.py), beside those for tall tiles."""

import emulation
import pytest
from products import pairwise

pytestmark = pytest.mark.slow

# The number of SMs, which decides how many rows a tile has, and the seed of the order of turns. Odd seeds delay copies.
MACHINES = ((1, 0), (3, 0), (132, 1))
ROWS = ("64", "96", "128", "192x128")
# Without this option only calls with pages have short tiles here: the others have too few keys or too many tiles.
WHEREVER_IT_CAN = dict(short_tiles=1)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    csrc = emulation.source(folder)
    return emulation.build_rows(csrc, "forward", folder, ROWS, only=dict(mask="any", dtype="any"))


DECODE = dict(mask="causal", seqlen_q=1, seqlen_k=1000, heads=8, kv_heads=1)
# More tiles of an SM than there are places for Q.
MANY = DECODE | dict(batch=6)
CALLS = [
    DECODE, MANY, DECODE | dict(seqlen_k=90), DECODE | dict(seqlen_q=72, heads=1),
    MANY | dict(seqlen_q=3, seqlen_k=330, nan_value=256, nan_values=44),
    # A row of each of eight heads, which are the first rows of threads, of sixteen, and of one.
    dict(mask="causal", batch=2, seqlen_q=1, seqlen_k=777, heads=8, kv_heads=1),
    dict(mask="causal", seqlen_q=1, seqlen_k=641, heads=16, kv_heads=1, sinks=1),
    dict(mask="full", batch=3, seqlen_q=1, seqlen_k=160),
    dict(mask="causal", seqlen_q=5, seqlen_k=1030, heads=4, kv_heads=1, dtype="fp16"),
    # All numbers of KV tiles from one to five, and a query without a key.
    *(dict(mask="causal", seqlen_q=2, seqlen_k=keys, heads=4, kv_heads=2) for keys in (1, 64, 129, 257, 385, 513)),
    # Tiles of one head's rows: of one tile, and a first one that reaches into the next.
    dict(mask="causal", seqlen_q=64, seqlen_k=500), dict(mask="causal", seqlen_q=72, seqlen_k=900),
    dict(mask="full", seqlen_q=133, seqlen_k=700), dict(mask="causal", seqlen_q=300, seqlen_k=300),
    # Scores that climb from tile to tile, that are not numbers and that are infinite.
    dict(mask="causal", seqlen_q=3, seqlen_k=800, climb=1000, climb_keys=80, scale=0.02),
    dict(mask="full", seqlen_q=20, seqlen_k=500, nan_query=7), dict(seqlen_q=40, seqlen_k=500, scale=4),
    dict(mask="causal", seqlen_q=4, seqlen_k=600, infinite_key=160, infinite_keys=128),
    dict(mask="causal", pack="1:250,5:400,200:0,0:7,64:64,1:129", heads=8, kv_heads=1),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_short_tiles_have_the_bits_of_tall_ones(programs, row, call):
    tall = emulation.check(programs[row], MACHINES[:1], **call)
    assert emulation.check(programs[row], MACHINES, **WHEREVER_IT_CAN, **call) == tall


@pytest.mark.parametrize("row", ROWS)
def test_pages(programs, row):
    call = dict(mask="causal", pack="1:850,1:400,1:0,1:7,1:64,1:1290", heads=8, kv_heads=1)
    expected = emulation.check(programs[row], MACHINES[:1], **call)
    for page_rows in (16, 64):
        assert emulation.check(programs[row], MACHINES, page_rows=page_rows, **call) == expected


STEPS = [
    dict(pack="1:850,1:400,1:0,1:7,1:64,1:1290", heads=8, kv_heads=1),
    dict(pack="3:850,3:2,3:640", heads=8, kv_heads=2, dtype="fp16"),
    # Several tiles of each head group.
    dict(pack="100:700,100:101", heads=2, kv_heads=2),
]


@pytest.mark.parametrize(
    "row, step, pages",
    pairwise(ROWS, STEPS, [dict(page_rows=1290, table=0, **WHEREVER_IT_CAN), dict(page_rows=16), dict(page_rows=24)]),
    ids=str,
)
def test_steps_of_decoding(programs, row, step, pages):
    """Where all tiles run at once, no plan runs before, and the kernel finds the sequences itself."""
    call = dict(mask="causal", **step)
    expected = emulation.check(programs[row], MACHINES[:1], **call)
    assert emulation.check(programs[row], MACHINES, step=1, **pages, **call) == expected


WRONG_NUMBERS = dict(mask="causal", pack="1:250,1:300,1:4", heads=8, kv_heads=1, step=1, wrong=1)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("pages", [dict(page_rows=300, table=0), dict(page_rows=16), dict(page_rows=7)], ids=str)
def test_steps_stay_within_the_cache(programs, row, pages):
    """Whatever lengths and the table say: nothing has checked them when the kernel reads them."""
    for short_tiles in (0, 1):
        emulation.check(programs[row], MACHINES[2:], short_tiles=short_tiles, **WRONG_NUMBERS, **pages)


# One query token with eight heads, tiles of several tokens, and more queries than a tile of one warpgroup has rows for.
# Some sequences have no keys, some fewer than a KV tile, and some have many.
PACKS = (
    dict(pack="1:850,1:400,1:0,1:7,1:64,1:1290", heads=8, kv_heads=1),
    dict(pack="200:600,3:3,0:40", heads=2, kv_heads=2, dtype="fp16"),
)


@pytest.mark.parametrize("row, pack, page_rows", pairwise(ROWS, PACKS, [1, 7, 24, 100]), ids=str)
def test_pages_that_cut_boxes(programs, row, pack, page_rows):
    """The rows of these pages are copied by all lanes of a warp."""
    qk, v = map(int, row.split("x") if "x" in row else (row, row))
    for dims in ({}, dict(head_dim=qk - 24, value_head_dim=v - 8)):
        call = dict(mask="causal", **pack, **dims)
        expected = emulation.check(programs[row], MACHINES[:1], **call)
        assert emulation.check(programs[row], (*MACHINES, (1, 1)), page_rows=page_rows, **call) == expected


NOBODY, WRONG = "nobody can go on", " is "
PAGES = dict(mask="causal", pack="1:1000", heads=8, kv_heads=1, page_rows=16)
ROWS_OF_PAGES = PAGES | dict(page_rows=7)
MANY_PAGES = PAGES | dict(pack=",".join(["1:1000"] * 6), sms=1)
SHORT = "forward/short_mainloop.h"
FAULTS = [
    # Rows that the next tile has too, but that this one leaves out.
    ("rows.last_position(this->params_) + 1", "min_int(end, sequence.seqlen_q)", SHORT, WRONG,
     PAGES | dict(pack="72:1000", heads=1)),
    # A K that is released before its product has completed, and one that never is.
    ("    wait_products<2>();\n    fence_operand(s);\n    if (has_next) { arrive",
     "    if (has_next) { arrive_once(this->shared_.k_empty[k.slot()]); }\n    wait_products<2>();\n"
     "    fence_operand(s);\n    if (false) { arrive",
     SHORT, WRONG, MANY_PAGES),
    ("      arrive_once(this->shared_.k_empty[this->k_.slot()]);\n", "", SHORT, NOBODY, MANY_PAGES),
    # Scores that are read while they are computed, and P that changes while its product reads it.
    ("wait_products<2>();", "wait_products<3>();", SHORT, WRONG, PAGES),
    ("complete_out<1>(out, p);", "complete_out<2>(out, p);", SHORT, "a register", PAGES),
    # A mask that is left out.
    ("if (masked) {", "if (false) {", SHORT, WRONG, PAGES | dict(pack="1:90")),
    # A loader of V that gives no tile back.
    ("      shared_.q_empty[q_.slot()].arrive();\n", "", "forward/load.h", NOBODY, MANY_PAGES),
    # Rows of pages. A KV tile whose barrier is completed before its rows have arrived, before products may read them,
    # never, or too late for the buffers; chunks without the swizzle; a key that is looked up twice; columns of the next
    # head.
    ("wait_for_copies<kLeft>();", "wait_for_copies<kLeft + 1>();", "forward/load.h", WRONG, ROWS_OF_PAGES),
    ("    ptx::fence_async_shared();\n", "", "forward/load.h", WRONG, ROWS_OF_PAGES),
    ("complete_copies<0>(ring_of_copies());", "", "forward/load.h", NOBODY, ROWS_OF_PAGES),
    ("kCopiedAhead = Variant::kStages - 2;", "kCopiedAhead = Variant::kStages - 1;", "forward/load.h", NOBODY,
     ROWS_OF_PAGES),
    ("Swizzle::place(row + row_of_lane, chunk)", "chunk", "forward/gather.h", WRONG, ROWS_OF_PAGES),
    ("i * 32 + lane, last_key", "i * 32 + lane / 2 * 2, last_key", "forward/load.h", WRONG,
     ROWS_OF_PAGES),
    # A length and an entry of the table that are not limited to the cache.
    ("_.pages.capacity()));", "_.pages.capacity() + 1));", "forward/load.h", "other results",
     WRONG_NUMBERS | dict(page_rows=16, sms=132)),
    ("max_int(0, min_int(place.page, num_pages - 1))", "max_int(0, place.page) % num_pages", "placement/sequences.h",
     "other results", WRONG_NUMBERS | dict(page_rows=16, sms=132)),
    ("< count && column < source.columns;", "< count;", "forward/gather.h", WRONG, ROWS_OF_PAGES | dict(head_dim=104)),
]  # fmt: skip


# The first one at every row, and without pages, where it shows that such calls have short tiles. Kernels for windows
# serve pages.
WITHOUT_PAGES = (*FAULTS[0][:-1], dict(mask="causal", seqlen_q=72, seqlen_k=1000) | WHEREVER_IT_CAN)


@pytest.mark.parametrize(
    "row, fault", [(row, fault) for row in ROWS for fault in (FAULTS[0], WITHOUT_PAGES)]
    + [("128", fault) for fault in FAULTS[1:]]
)  # fmt: skip
def test_faults_are_found(tmp_path, row, fault):
    right, wrong, file, message, call = fault
    csrc = emulation.source(tmp_path, (file, right, wrong))
    program = emulation.build(csrc, "forward", row, tmp_path / "forward", only=dict(mask="any"))
    result = emulation.run(program, **{"sms": 2, **call, "seed": "0,1,2,3"})
    assert result.returncode == 1 and message in result.stdout
