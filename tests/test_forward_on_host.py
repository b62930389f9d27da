"""The forward kernels' own source on the host (emulation.py). No GPU is needed."""

import emulation
import numpy as np
import pytest
from emulation import ROWS
from products import pairwise

# test_kernels_on_host.py has one kernel of each pass.
pytestmark = pytest.mark.slow

# SMs, which decide how many rows a tile has and who computes it. Products are late where the seed is odd.
MACHINES = ((1, 1), (3, 0), (132, 3))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forward")
    return emulation.build_rows(emulation.source(folder), "forward", folder)


def check(program, machines=MACHINES, **call):
    return emulation.check(program, machines, **call)


@pytest.fixture(scope="module")
def deciding_program(tmp_path_factory):
    """Of row 128: one that looks for the largest score in every step."""
    folder = tmp_path_factory.mktemp("deciding")
    csrc = emulation.source(folder, ("forward/softmax.h", "if (!may_move<kRows>(s)) { return false; }", ""))
    return emulation.build(csrc, "forward", "128", folder / "forward")


CLIMB = dict(climb=1000, climb_keys=80, scale=0.02)
BELOW_ZERO = CLIMB | dict(climb_from=-4000)
BOTH_WAYS = CLIMB | dict(climb_from=4000, climb=-1000, climb_rows=8)


SCORES = [
    dict(slopes=1), dict(scale=0.5), dict(scale=4), dict(scale=1e-3), dict(infinite_key=160, infinite_keys=80),
    CLIMB, CLIMB | dict(climb=-300), CLIMB | dict(climb=350), BELOW_ZERO, BELOW_ZERO | dict(climb=150),
    BELOW_ZERO | dict(climb=0, scale=0.2), BELOW_ZERO | dict(climb_from=-270, climb=0, scale=0.1),
    CLIMB | dict(climb_rows=1), CLIMB | dict(climb_rows=8), BELOW_ZERO | dict(climb_rows=1),
    BELOW_ZERO | dict(climb_rows=8), BOTH_WAYS, BOTH_WAYS | dict(climb_rows=1),
]  # fmt: skip
SCORE_MASKS = [dict(), dict(mask="causal"), dict(mask="window", left=150, right=30)]
# The decision is about a row's scores alone: each kind of scores has either dtype, and with every other another mask.
DECISIONS = [
    scores | SCORE_MASKS[(i + j) % len(SCORE_MASKS)] | dict(dtype=dtype)
    for i, scores in enumerate(SCORES)
    for j, dtype in enumerate(("bf16", "fp16"))
]


def check_against_deciding(programs, deciding_program, machines=MACHINES, **call):
    # One machine says what all machines say: its bits are compared with those that several have. The largest logits,
    # whose digest comes last, take another kernel and more steps that look for the largest score, but change no other
    # bits.
    outputs = check(programs["128"], machines, **call)
    if "slopes" in call:  # whose kernels do not find the largest logits
        assert outputs == emulation.check(deciding_program, MACHINES[:1], **call)
        return
    with_max_logits = check(programs["128"], machines, max_logits=1, **call)
    assert with_max_logits == emulation.check(deciding_program, MACHINES[:1], max_logits=1, **call)
    assert with_max_logits.startswith(outputs) and len(with_max_logits) > len(outputs)


@pytest.mark.parametrize("call", DECISIONS, ids=str)
def test_no_bits_change_where_no_largest_score_is_looked_for(programs, deciding_program, call):
    check_against_deciding(programs, deciding_program, **(dict(seqlen_q=200, seqlen_k=420) | call))


@pytest.mark.parametrize("climb_from", [6000, 640, 0, -640, -4000])
@pytest.mark.parametrize("climb", [320, 352, 416, 448])
def test_no_bits_change_where_a_score_is_as_far_above_the_reference_as_it_may_be(
    programs, deciding_program, climb, climb_from
):
    """By 8 of the logarithm to base 2, but for roundings."""
    scale = 8 / (climb * np.log2(np.e))
    call = dict(seqlen_q=64, seqlen_k=640, climb=climb, climb_from=climb_from, climb_keys=80, climb_alone=1)
    for step in (-2, -1, 0, 1, 2):
        call["scale"] = float(np.float32(scale) * (1 + np.float32(step * 2**-23)))
        # Whose one tile is the same on all machines.
        check_against_deciding(programs, deciding_program, MACHINES[:1], **call)


# With a large scale the reference of a row moves after its first KV tile.
LENGTHS = [dict(seqlen_q=300, scale=2), dict(seqlen_q=65, seqlen_k=333), dict(seqlen_q=257, seqlen_k=100)]


@pytest.mark.parametrize("row, mask, lengths", pairwise(ROWS, ["full", "causal"], LENGTHS), ids=str)
def test_dense_masks(programs, row, mask, lengths):
    check(programs[row], mask=mask, heads=2, **lengths)


# What is passed over at either end of a run of KV tiles: none, few, and more than are held at a time.
WINDOWS = [
    dict(left=63, right=0), dict(left=200, right=5), dict(left=0, right=0), dict(left=-1, right=150),
    dict(left=100, right=0, chunk=257), dict(chunk=80), dict(right=0, chunk=400), dict(chunk=128),
    # A chunk that ends between warpgroups, with as many tiles behind it as there are places, and more.
    dict(seqlen_q=656, seqlen_k=640, chunk=240), dict(seqlen_q=768, seqlen_k=768, chunk=320, heads=2),
]  # fmt: skip


# Every window at 64 and 128, half of them at another row and the other half at the next one. But those with lengths of
# their own are everywhere: only they find a loader that reaches too far ahead at 192.
WINDOW_ROWS = [
    (row, window)
    for i, window in enumerate(WINDOWS)
    for j, row in enumerate(ROWS)
    if row in ("64", "128") or "seqlen_q" in window or (i + j) % 2 == 0
]


@pytest.mark.parametrize("row, window", WINDOW_ROWS, ids=str)
def test_windows_and_chunks(programs, row, window):
    # So many heads that one SM has tiles of as many rows as there are.
    check(programs[row], **dict(mask="window", seqlen_q=640, seqlen_k=700, heads=4, kv_heads=1) | window)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("first_key", [0, 240])
def test_scores_of_minus_infinity(programs, row, mask, first_key):
    """Of a whole KV tile, which rows see: the first that is walked, and one between others."""
    check(programs[row], mask=mask, seqlen_q=500, infinite_key=first_key, infinite_keys=128)


@pytest.mark.parametrize("row, sinks, mask", pairwise(ROWS, [0, 1], ["full", "causal"]))
def test_a_score_of_plus_infinity(programs, row, mask, sinks):
    """Rows that see it are NaN, with their log-sum-exp, whatever comes before and after; the others are not."""
    for key in (0, 240, 499):
        check(programs[row], mask=mask, seqlen_q=500, infinite_key=key, infinite_keys=1, infinite_sign=1, sinks=sinks)


@pytest.mark.parametrize("row", ROWS)
def test_values_in_tiles_that_rows_do_not_see(programs, row):
    """They are NaN, and leave no trace in rows that see no key of their tiles."""
    check(programs[row], mask="causal", seqlen_q=300, seqlen_k=300, nan_value=256, nan_values=44)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mask", [dict(mask="causal"), dict(mask="window", left=100, right=0, chunk=128)], ids=str)
def test_packs(programs, row, mask):
    check(programs[row], pack="130:250,5:400,200:0,0:7,64:64,1:129", heads=2, kv_heads=1, **mask)


PAGED_MASKS = [dict(mask="causal"), dict(mask="full"), dict(mask="window", left=70, right=5)]


# The largest page holds a whole sequence.
@pytest.mark.parametrize("row, mask, page_rows", pairwise(ROWS, PAGED_MASKS, [16, 48, 512]), ids=str)
def test_keys_in_pages_have_the_bits_of_keys_in_one_tensor(programs, row, mask, page_rows):
    """Kernels for windows read pages, whatever the mask is. What is outside the keys in a page is NaN."""
    call = dict(pack="1:250,5:400,3:0,0:7,64:64,1:129,2:17,200:210", heads=4, kv_heads=2, **mask)
    assert check(programs[row], page_rows=page_rows, **call) == check(programs[row], **call)


STEPS = [dict(), dict(sinks=1), dict(softcap=1), dict(slopes=1)]


@pytest.mark.parametrize("row, mask, score", pairwise(ROWS, PAGED_MASKS, STEPS), ids=str)
def test_steps_of_decoding(programs, row, mask, score):
    """Without a plan: the kernel finds sequences in a cache itself, where all tiles run at once."""
    call = dict(pack="3:250,3:400,3:0,3:7", heads=4, kv_heads=2, **mask, **score)
    assert check(programs[row], step=1, page_rows=400, table=0, **call) == check(programs[row], **call)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("score", ["sinks", "softcap", "slopes", "dropout"])
@pytest.mark.parametrize("mask", [dict(mask="causal"), dict(mask="window", left=90, right=20)], ids=str)
def test_scores(programs, row, score, mask):
    check(programs[row], seqlen_q=200, seqlen_k=260, heads=2, **{score: 0.25 if score == "dropout" else 1}, **mask)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("call", [dict(scale=4), dict(scale=0.01), CLIMB, BELOW_ZERO], ids=str)
def test_scores_that_climb_or_hardly_differ(programs, row, call):
    check(programs[row], seqlen_q=300, seqlen_k=500, dtype="fp16", **call)


@pytest.mark.parametrize("row", ["64", "128"])
def test_heads_packed_into_a_tile(programs, row):
    check(programs[row], mask="causal", batch=2, seqlen_q=20, seqlen_k=300, heads=16, kv_heads=2)


@pytest.mark.parametrize("row, dims", [("64", (40, 24)), ("192x128", (136, 64)), ("256", (200, 248))], ids=str)
def test_head_dims_between_rows_of_the_table(programs, row, dims):
    check(programs[row], mask="causal", seqlen_q=150, head_dim=dims[0], value_head_dim=dims[1])


@pytest.mark.parametrize("number", range(24))
def test_products_of_features(programs, number):
    random = np.random.default_rng(number)

    def choose(*values):
        return values[random.integers(len(values))]

    call = dict(mask=choose("full", "causal", "window", "window"), dtype=choose("bf16", "fp16"))
    if call["mask"] == "window":
        call |= dict(left=choose(-1, 5, 64, 127, 333), right=choose(0, 0, 3, 150), chunk=choose(0, 0, 64, 100, 257))
    call["kv_heads"] = choose(1, 2)
    call["heads"] = call["kv_heads"] * choose(1, 2, 4)
    if choose(True, False):
        lengths = (f"{choose(1, 64, 130, 333)}:{choose(0, 1, 80, 250, 400)}" for _ in range(choose(1, 3)))
        call["pack"] = ",".join(lengths)
    else:
        call |= dict(batch=choose(1, 2), seqlen_q=choose(1, 64, 129, 192, 300, 400), seqlen_k=choose(1, 80, 256, 400))
    call |= choose({}, {}, dict(sinks=1), dict(slopes=1), dict(dropout=0.25))
    check(programs[choose(*ROWS)], **call)


# Under a window many rows see no key of their first tile. Where queries are few, heads share tiles in the calls without
# the largest logits.
MAX_LOGITS = [
    dict(seqlen_q=300, seqlen_k=333, heads=2), dict(mask="causal", seqlen_q=257, seqlen_k=100),
    dict(mask="causal", batch=2, seqlen_q=20, seqlen_k=300, heads=16, kv_heads=2),
    dict(mask="window", left=70, right=5, seqlen_q=300, seqlen_k=280, heads=4, kv_heads=2),
    dict(mask="causal", pack="130:250,5:400,200:0,0:7,64:64,1:129", heads=2, kv_heads=1),
    dict(mask="window", left=90, right=20, chunk=128, pack="1:250,5:400,3:0,200:210", heads=4, kv_heads=2),
    dict(mask="causal", seqlen_q=200, seqlen_k=260, heads=2, sinks=1),
    dict(mask="causal", columns="documents", seqlen_q=300),
    dict(mask="causal", seqlen_q=300, infinite_key=0, infinite_keys=200),
    dict(mask="causal", seqlen_q=300, infinite_key=240, infinite_keys=1, infinite_sign=1),
    dict(seqlen_q=300, nan_query=130), dict(seqlen_q=150, seqlen_k=500, dtype="fp16") | BELOW_ZERO,
]  # fmt: skip


# Every call at 128, and half of them at every other row.
LARGEST_LOGITS = [
    (row, call) for i, call in enumerate(MAX_LOGITS) for j, row in enumerate(ROWS) if row == "128" or (i + j) % 2 == 0
]


@pytest.mark.parametrize("row, call", LARGEST_LOGITS, ids=str)
def test_largest_logits(programs, row, call):
    outputs = check(programs[row], **call)
    with_max_logits = check(programs[row], max_logits=1, **call)
    assert with_max_logits.startswith(outputs) and len(with_max_logits) > len(outputs)


NOBODY, WRONG = "nobody can go on", " is "
FAULTS = [
    # Reaching ahead where the loader needs the V in use first.
    ("128", "forward/mainloop.h", "rows.passed_after + next.passed_before <= Variant::kStages", "true", NOBODY,
     dict(mask="window", seqlen_q=700, chunk=128, heads=4, sms=1)),
    # Tiles that are passed over before their V, however many.
    ("128", "forward/mainloop.h", "tiles >= Variant::kStages", "false", NOBODY,
     dict(mask="window", seqlen_q=768, chunk=320, heads=2, sms=1)),
    ("128", "forward/mainloop.h", "tiles >= Variant::kStages", "tiles > Variant::kStages", NOBODY,
     dict(mask="window", seqlen_q=656, seqlen_k=640, chunk=240, heads=4, sms=1)),
    # A K that is released before its product has completed.
    ("64", "forward/mainloop.h", "    wait_products<1>();  // S\n    release_k(s);\n    if (",
     "    arrive_once(shared_.k_empty[k_.slot()]);\n    wait_products<1>();\n"
     "    fence_operand(s), k_ = k_.next();\n    if (", WRONG, dict(seqlen_q=1000)),
    # A place of Q that is never given back: the report names the barrier.
    ("64", "forward/store.h", "        shared_.q_empty[q_.slot()].arrive();", "",
     "shared_.q_empty[q_.slot()].wait(q_.empty_parity())", dict(seqlen_q=900, sms=1)),
    # A sum that does not follow its reference.
    ("128", "forward/softmax.h", "corrects ? correction[row] : 1.f", "1.f", WRONG,
     dict(seqlen_q=300, scale=2)),
    # A reference that stays too far behind: P overflows.
    ("128", "forward/softmax.h", "stays_below = reference(row) + kSlack;", "stays_below = reference(row) + 64.f;",
     WRONG, dict(seqlen_q=300, scale=4, dtype="fp16")),
    # The limit of a thread's other row.
    ("128", "forward/softmax.h", "|| (kRows > 1 && largest[1] >= int(limit_[1]))", "", WRONG,
     dict(seqlen_q=300, scale=4, dtype="fp16")),
    # Scores below zero, whose bits are not in their order.
    ("128", "forward/softmax.h", "may = smallest[0] <= limit_[0] || (kRows > 1 && smallest[1] <= limit_[1])",
     "may = false", WRONG,
     BELOW_ZERO | dict(seqlen_q=300, dtype="fp16")),
    # Limits with a sign and without one in a thread.
    ("128", "forward/softmax.h", "for (uint32_t& limit : limit_) { limit = max(limit, kNoSign); }", "", WRONG,
     BOTH_WAYS | dict(climb_from=-8000, seqlen_q=200, seqlen_k=420, dtype="fp16")),
    # Largest logits below zero, which the signed comparison loses, and those of rows that are of no sequence.
    ("128", "forward/softmax.h", "finds_largest && (largest_.of[0] < 0 || largest_.of[1] < 0)", "false", WRONG,
     BELOW_ZERO | dict(seqlen_q=70, seqlen_k=300, climb_from=-100, climb=0, max_logits=1)),
    ("128", "forward/mainloop.h", "exists ? softmax.largest(row) : -INFINITY", "softmax.largest(row)", WRONG,
     BELOW_ZERO | dict(pack="10:300,20:300", climb_from=-100, climb=0, max_logits=1)),
    # A call without columns whose rows with scores of -inf alone count as rows that see no key.
    ("128", "forward/mainloop.h", "if (params_.columns.hide_keys) { return", "{ return", WRONG,
     dict(mask="causal", seqlen_q=300, infinite_key=0, infinite_keys=200, max_logits=1)),
    # What a row summed before its first key is multiplied, not replaced.
    ("128", "forward/softmax.h", "__float_as_uint(factor) == __float_as_uint(kNothingSummed)", "false", WRONG,
     dict(mask="causal", seqlen_q=300, nan_value=256, nan_values=44)),
    # Keys one too many.
    ("256", "forward/score_tile.h", "(0, i) >= end - column", "(0, i) > end - column", WRONG,
     dict(mask="causal", seqlen_q=100)),
    # An output that TMA may not see yet.
    ("64", "device/warp_roles.h", "  ptx::fence_async_shared();\n", "", WRONG, dict(seqlen_q=64)),
    # Two warpgroups' outputs in the place of one V.
    ("192x128", "forward/mainloop.h", "place{v_.count + consumer_}", "place{v_.count + (consumer_ > 0)}", WRONG,
     dict(seqlen_q=384, heads=2, sms=1)),
    # V that comes to a place which an output has not left.
    ("192x128", "forward/load.h", "shared_.out_left) { left.wait", "shared_.out_left) { if (false) left.wait",
     WRONG, dict(seqlen_q=384, seqlen_k=400, heads=4, sms=1)),
    # Bits of dropout read behind the last block.
    ("128", "forward/row_bits.h", "read(params.dropout, found(rows), (", "read_whole(found(rows), (",
     "a load of what is not there", dict(seqlen_q=250, dropout=0.25)),
    # P that changes while its product reads it.
    ("192", "forward/mainloop.h", "    complete_out(out, p);\n    if (corrects)",
     "    round_p(p, s, bits_read, kv_tile);\n    complete_out(out, p);\n    if (corrects)",
     "a register changed", dict(seqlen_q=300)),
]  # fmt: skip


@pytest.mark.parametrize("row, file, right, wrong, message, call", FAULTS, ids=range(len(FAULTS)))
def test_faults_are_found(tmp_path, row, file, right, wrong, message, call):
    csrc = emulation.source(tmp_path, (file, right, wrong))
    program = emulation.build(csrc, "forward", row, tmp_path / "forward", only=call)
    result = emulation.run(program, **{"sms": 2, **call, "seed": "0,1,2,3"})
    assert result.returncode == 1 and message in result.stdout
