"""The backward's own source on the host (emulation.py): several CTAs side by side, which wait for each other's partials
of dQ. No GPU is needed."""

import subprocess

import emulation
import numpy as np
import pytest
from emulation import ROWS
from products import pairwise

# test_kernels_on_host.py has one kernel of each pass.
pytestmark = pytest.mark.slow

# One SM, on which nobody may wait for what comes later, and several.
MACHINES = ((1, 0), (3, 1), (4, 2))
SCHEDULES = ("descending", "order_free")
# By row of the table of tiles, those that it has kernels of: order-free sums go up to head dim 128.
ROW_SCHEDULES = [(row, name) for row in ROWS for name in SCHEDULES if name == "descending" or int(row[:3]) <= 128]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backward")
    csrc = emulation.source(folder)
    return emulation.build_rows(csrc, "backward", folder)


FINISHING_ROWS = ("64", "128")


def changed_program(folder, row, call, *changes):
    """With changes of the source, for calls of the kind of `call`."""
    csrc = emulation.source(folder, *changes)
    return emulation.build(csrc, "backward", row, folder / "program", only=call)


def check_is_found(folder, row, machines, call, *changes):
    """A fault: a wrong gradient, other bits on another machine, or no end."""
    program = changed_program(folder, row, call, *changes)
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        emulation.check(program, machines, **call)


# Every second head is in parts: where first parts of all heads come first, the others' numbers lie among its own.
MIXED = ("backward/whole_tiles.h", "have_begun(params, kv_tiles) ?",
         "have_begun(params, kv_tiles) && first_number / kv_tiles % 2 == 0 ?")  # fmt: skip


SHIFT = dict(schedule="shift")


@pytest.fixture(scope="module")
def mixed_program(tmp_path_factory):
    return changed_program(tmp_path_factory.mktemp("mixed"), "64", SHIFT, MIXED)


def check(program, **call):
    return emulation.check(program, MACHINES, **call)


MASKS = {
    "full": dict(heads=2, seqlen_q=300),
    "causal": dict(heads=4, kv_heads=1, seqlen_q=200, seqlen_k=333),
    "window": dict(left=100, right=20, heads=2, seqlen_q=300),
}
# Of wide heads, whose tiles are smaller and whose products take longer here.
WIDE_MASKS = {
    "full": dict(seqlen_q=150, seqlen_k=200),
    "causal": dict(heads=2, kv_heads=1, seqlen_q=130, seqlen_k=200),
    "window": dict(left=50, right=20, seqlen_q=200),
}


@pytest.mark.parametrize("row, schedule", ROW_SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(programs, row, schedule, mask):
    masks = MASKS if int(row[:3]) <= 128 else WIDE_MASKS
    check(programs[row], mask=mask, schedule=schedule, **masks[mask])


@pytest.mark.parametrize("row, schedule", [case for case in ROW_SCHEDULES if case[0] in ("64", "128", "192x128")])
def test_packs(programs, row, schedule):
    lengths = "130:250,5:400,200:0,0:7,64:64,1:129"
    check(programs[row], pack=lengths, heads=2, kv_heads=1, mask="causal", schedule=schedule)


FINISHED = [
    *(dict(mask=mask, **call) for mask, call in MASKS.items()),
    dict(pack="130:250,5:400,200:0,0:7,64:64,1:129", heads=2, kv_heads=1, mask="causal"),
    dict(heads=3, seqlen_q=100, seqlen_k=60),
    dict(heads=2, kv_heads=1, mask="causal", seqlen_q=300, seqlen_k=130, dtype="fp16", head_dim=56),
]  # fmt: skip
# Whose rows and heads only order-free sums know.
FINISHED_ORDER_FREE = [
    dict(heads=4, kv_heads=2, tiny_head=1, mask="causal", seqlen_q=150, seqlen_k=300),
    dict(infinite_row=50, lone_column=33, dtype="fp16", seqlen_q=100, seqlen_k=4),
]


@pytest.mark.parametrize("row, schedule, call", [
    *pairwise(FINISHING_ROWS, SCHEDULES, FINISHED),
    *((row, "order_free", call) for row in FINISHING_ROWS for call in FINISHED_ORDER_FREE),
], ids=str)  # fmt: skip
def test_finished_by_who_adds_last(programs, row, schedule, call):
    finished, converted = (check(programs[row], schedule=schedule, finishes_dq=choice, **call) for choice in (1, 0))
    assert finished == converted


@pytest.mark.parametrize("row", FINISHING_ROWS)
@pytest.mark.parametrize("call", [
    dict(heads=4, kv_heads=2, seqlen_q=300, seqlen_k=400),
    dict(heads=2, kv_heads=1, pack="130:250,5:600,200:0,0:300,64:64,1:129"),
], ids=str)  # fmt: skip
def test_finished_in_parts(programs, row, call):
    of_both = {emulation.check(programs[row], LATE, schedule="shift", finishes_dq=choice, **call) for choice in (0, 1)}
    assert len(of_both) == 1


def test_finished_by_as_many_ctas_as_there_are_work_tiles(programs):
    """Whose number decides who makes dQ, and so on no bit: 4 work tiles, 1 to 5 CTAs."""
    emulation.check(programs["64"], LATE, seqlen_q=300, seqlen_k=500, schedule="shift")


@pytest.mark.parametrize("row", ["64", "128"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_head_needs_the_order(programs, row, mask):
    """Whose V is so small that dQ has no units; then all heads come as under descending."""
    call = dict(heads=4, kv_heads=2, tiny_head=1, mask=mask, schedule="order_free")
    check(programs[row], seqlen_q=150, seqlen_k=300, **call)
    check(programs[row], pack="130:250,200:0,0:7,64:64,1:129", **call)


@pytest.mark.parametrize("row, others", [("96", ("spt", "order_free")), ("192", ("spt",))])
def test_orders(programs, row, others):
    """Ranks decide on the bits of dQ, visits on those of dK and dV."""
    call = dict(mask="full", dtype="fp16", heads=3, seqlen_q=150, seqlen_k=400)
    digests = {name: check(programs[row], schedule=name, **call).split() for name in ("descending", *others)}
    dq = {name: found[0] for name, found in digests.items()}
    keys = {name: found[1:] for name, found in digests.items()}
    assert len(set(dq.values())) == len(dq)
    assert keys["spt"] != keys["descending"] == keys.get("order_free", keys["descending"])


# Of 5 CTAs the last begins when another has ended.
LATE = (*MACHINES, (5, 3))


@pytest.mark.parametrize("row", ["64", "96"])
def test_divided_kv_tiles(programs, row):
    """A head of as many KV tiles as there are CTAs, or fewer, is worked on whole, others in parts: the same bits."""
    call = dict(heads=4, kv_heads=2, schedule="shift")
    emulation.check(programs[row], LATE, seqlen_q=300, seqlen_k=400, **call)
    emulation.check(programs[row], LATE, pack="130:250,5:600,200:0,0:300,64:64,1:129", **call)


# Where each KV tile has a CTA, but not each part, as on the machines of 4 and 5, first parts of all heads come first.
TOGETHER = [
    dict(heads=4, kv_heads=2, seqlen_q=300, seqlen_k=200),
    dict(heads=4, kv_heads=2, seqlen_q=2049, seqlen_k=129),
    dict(batch=2, heads=1, seqlen_q=300, seqlen_k=200),
]


@pytest.mark.parametrize("call", TOGETHER, ids=str)
def test_divided_kv_tiles_of_all_heads_together(programs, mixed_program, call):
    digests = {emulation.check(program, LATE, schedule="shift", **call) for program in (programs["64"], mixed_program)}
    assert len(digests) == 1


def test_divided_kv_tiles_of_split_query_heads(programs):
    emulation.check(programs["64"], LATE, heads=2, kv_heads=1, seqlen_q=2049, seqlen_k=129, schedule="shift")


def test_splits_of_query_heads(programs):
    call = dict(heads=4, kv_heads=1, seqlen_q=1100, seqlen_k=64)
    for schedule in SCHEDULES:
        check(programs["64"], schedule=schedule, **call)


@pytest.mark.parametrize("row, score", [
    *((row, score) for row in ("64", "256") for score in (dict(softcap=2), dict(slopes=1))),
    *((row, dict(dropout=0.25)) for row in ("96", "256")),
], ids=str)  # fmt: skip
def test_scores(programs, row, score):
    check(programs[row], mask="causal", heads=2, seqlen_q=100, seqlen_k=130, **score)


@pytest.mark.parametrize("row, dims", [
    ("64", (40, 40)), ("96", (72, 88)), ("192x128", (136, 64)), ("256", (200, 248)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_head_dims_between_rows_of_the_table(programs, row, dims, schedule):
    if (row, schedule) not in ROW_SCHEDULES:
        pytest.skip("the row has no order-free sums")
    dims = dict(head_dim=dims[0], value_head_dim=dims[1])
    check(programs[row], mask="causal", seqlen_q=150, dtype="fp16", schedule=schedule, **dims)


@pytest.mark.parametrize("row, column", [("64", 33), ("96", 33), ("128", 33), ("128", 97)], ids=str)
def test_infinity_reaches_all_columns_of_its_row_alone(programs, row, column):
    """In the columns of a partial by which order-free sums know such a row, it is infinity times zero."""
    call = dict(dtype="fp16", schedule="order_free", seqlen_q=100, seqlen_k=4)
    check(programs[row], infinite_row=50, lone_column=column, **call)


@pytest.mark.parametrize("number", range(10))
def test_products_of_features(programs, number):
    random = np.random.default_rng(number)

    def choose(*values):
        return values[random.integers(len(values))]

    row, schedule = choose(*ROW_SCHEDULES)
    call = dict(mask=choose("full", "causal", "window"), dtype=choose("bf16", "fp16"), schedule=schedule)
    if call["mask"] == "window":
        call |= dict(left=choose(-1, 5, 64, 127), right=choose(0, 0, 3, 150), chunk=choose(0, 0, 100))
    call["kv_heads"] = choose(1, 2)
    call["heads"] = call["kv_heads"] * choose(1, 2)
    if choose(True, False):
        lengths = (f"{choose(1, 64, 130)}:{choose(0, 1, 80, 250)}" for _ in range(choose(1, 3)))
        call["pack"] = ",".join(lengths)
    else:
        call |= dict(batch=choose(1, 2), seqlen_q=choose(1, 64, 129, 250), seqlen_k=choose(1, 80, 256))
    check(programs[row], **call, **choose({}, dict(sinks=1)))


COUNTER_TOO_FAR = ("backward/work_ring.h", "move_counter_to(params, next);", "move_counter_to(params, next + 1);")
FAULTS = [
    # A rank that does not wait for those before it.
    ("64", "backward/dq_add.h", "is_ordered ? added != rank : added == 0", "is_ordered ? false : added == 0",
     dict(seqlen_q=200, seqlen_k=600)),
    # In no order: partials that do not wait for the one that is stored.
    ("64", "backward/dq_add.h", "is_ordered ? added != rank : added == 0", "is_ordered && added != rank",
     dict(seqlen_q=200, seqlen_k=600, schedule="order_free")),
    # A sum that begins with what was there before.
    ("64", "backward/dq_add.h", "stores = rank == 0 && !continues", "stores = false",
     dict(seqlen_q=200, seqlen_k=200, schedule="order_free")),
    # A turn that is passed on before the sum is there.
    ("128", "backward/dq_add.h", "    ptx::bulk_wait_performed();\n", "", dict(seqlen_q=200, seqlen_k=300)),
    # dQ of half of dS.
    ("128", "backward/mainloop.h", "    shared_.ds_full[step.slot()].wait(step.parity());\n", "",
     dict(seqlen_q=200, seqlen_k=128)),
    # dS that is written while dK of the step before reads it.
    ("256", "backward/wide/mainloop.h", "    sync_warpgroup(kKeyBarrier);  // dK of the step before", "    //",
     dict(seqlen_q=300, seqlen_k=80)),
    # A pack that does not know how many heads take turns.
    ("64", "placement/pack_needs.h", "sequence.swizzle_with_turns = need.swizzle_with_turns;", "",
     dict(pack="64:64,130:250", heads=2, tiny_head=1, schedule="order_free")),
    # A work tile that writes where the gradients of the one before have not left.
    ("128", "backward/epilogue.h", "    if (thread == 0) { ptx::bulk_wait_read(); }\n", "",
     dict(heads=4, seqlen_q=64, seqlen_k=300)),
    # dV that is staged where an adder has not read a partial.
    ("128", "backward/epilogue.h", "      shared.dq_empty[next.slot()].wait(next.empty_parity());\n", "",
     dict(heads=2, seqlen_q=128, seqlen_k=1000)),
    # Sums of splits that are taken before they are there.
    ("64", "backward/split_reduction.h", "ptx::load_acquire(semaphore_) != value", "false",
     dict(heads=4, kv_heads=1, seqlen_q=1100, seqlen_k=64)),
    # A counter that is moved past more than a head's second parts.
    ("64", *COUNTER_TOO_FAR, dict(heads=4, seqlen_q=300, seqlen_k=200, schedule="shift")),
]  # fmt: skip


# The same where dQ is made of its sums by who adds last.
FINISHING_FAULTS = [
    # A sum that is taken before it is there.
    ("64", "backward/mainloop.h",
     "    if (has_sum) { shared_.sum_full[step.slot()].wait(sum == DqSum::kOddSum); }\n", "",
     dict(seqlen_q=64, seqlen_k=1000)),
    # A sum that is brought before the others are in it.
    ("64", "backward/dq_add.h", "wait_for_turn(params_.workspace.dq_semaphores + step.dq_tile, step.rank, true);", "",
     dict(seqlen_q=200, seqlen_k=600, schedule="order_free")),
    # dQ that takes the place of sums that others have not read.
    ("64", "backward/finish_dq.h", "  sync_warpgroup(1 + consumer);", "  //", dict(seqlen_q=200, seqlen_k=600)),
    # A sum that is brought where dV has not left.
    ("128", "backward/dq_add.h",
     "        shared_.ds_full[buffer.slot()].wait(buffer.parity());\n", "",
     dict(heads=4, seqlen_q=64, seqlen_k=300)),
    # The second of two sums that come to a buffer, taken for the first.
    ("64", "backward/plan.h", "      shared_.sum_parities ^= buffer;\n", "", dict(seqlen_q=600, seqlen_k=200)),
    # Both of divided KV tiles: a sum that is taken before it is there, and one that is taken for another.
    ("64", "backward/mainloop.h",
     "    if (has_sum) { shared_.sum_full[step.slot()].wait(sum == DqSum::kOddSum); }\n", "",
     dict(seqlen_q=600, seqlen_k=300, schedule="shift")),
    ("64", "backward/plan.h", "      shared_.sum_parities ^= buffer;\n", "",
     dict(seqlen_q=1000, seqlen_k=300, schedule="shift")),
]  # fmt: skip


@pytest.mark.parametrize("row, file, right, wrong, call", FINISHING_FAULTS, ids=range(len(FINISHING_FAULTS)))
def test_faults_of_finishing_are_found(programs, tmp_path, row, file, right, wrong, call):
    machines = tuple((4, seed) for seed in range(6))
    call = dict(call, finishes_dq=1)
    emulation.check(programs[row], machines, **call)
    check_is_found(tmp_path, row, machines, call, (file, right, wrong))


@pytest.mark.parametrize("row, file, right, wrong, call", FAULTS, ids=range(len(FAULTS)))
def test_faults_are_found(programs, tmp_path, row, file, right, wrong, call):
    """By a wrong gradient, or other bits on another machine; the source as it is has neither."""
    machines = tuple((4, seed) for seed in range(6))
    emulation.check(programs[row], machines, **call)
    check_is_found(tmp_path, row, machines, call, (file, right, wrong))


def test_a_counter_that_is_moved_past_a_part_of_another_head_is_found(mixed_program, tmp_path):
    machines = tuple((sms, seed) for sms in (4, 5) for seed in range(6))
    call = dict(TOGETHER[0], schedule="shift")
    emulation.check(mixed_program, machines, **call)
    check_is_found(tmp_path, "64", machines, call, MIXED, COUNTER_TOO_FAR)
