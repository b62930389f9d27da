"""Masks by key columns on the host (emulation.py): the kernels' own source, and that of the plan before them."""

import functools

import emulation
import pytest
from emulation import ROWS
from products import pairwise

pytestmark = pytest.mark.slow

MACHINES = ((1, 1), (3, 0), (132, 2))
# FlashMask's flag, the numbers of a key, and the rest of the mask.
FORMS = [
    dict(mask="causal", per_key=1), dict(mask="causal", per_key=2), dict(mask="full", per_key=2),
    dict(mask="full", per_key=4), dict(mask="window", per_key=4, left=150, right=40),
]  # fmt: skip
KINDS = ("random", "documents")
SHAPES = [
    dict(seqlen_q=300, seqlen_k=300), dict(seqlen_q=200, seqlen_k=517, batch=2, heads=2, mask_heads=2),
    dict(pack="130:130,1:40,0:7,333:333,64:64", heads=2, kv_heads=1, sinks=1),
]  # fmt: skip
# All kernels by one call, and one kernel by calls with every pair of their parameters.
CALLS = [(row, FORMS[0] | dict(columns="random") | SHAPES[1]) for row in ROWS]
CALLS += [("128", form | dict(columns=kind) | shape) for form, kind, shape in pairwise(FORMS, KINDS, SHAPES)]
PASSES = ("forward", "backward")


@pytest.fixture(scope="module")
def programs_of(tmp_path_factory):
    """Of a pass, by row of the table of tiles."""

    @functools.cache
    def built(name):
        folder = tmp_path_factory.mktemp(name)
        return emulation.build_rows(emulation.source(folder), name, folder, only=dict(columns="random"))

    return built


@pytest.fixture(params=PASSES)
def programs(request, programs_of):
    return programs_of(request.param)


@pytest.mark.parametrize("row, call", CALLS, ids=str)
def test_masks_by_columns(programs, row, call):
    emulation.check(programs[row], MACHINES, **call)


# So many KV tiles, in both passes, that several CTAs plan those of a head if there are several SMs.
LONG = FORMS[0] | dict(columns="random", seqlen_q=40, seqlen_k=6150, heads=2, kv_heads=2, mask_heads=2)


def test_several_ctas_plan_a_long_sequence(programs):
    emulation.check(programs["64"], ((1, 1), (5, 0)), **LONG)


@pytest.mark.parametrize("name", PASSES)
def test_a_plan_of_which_a_part_is_missing_is_found(tmp_path, name):
    fault = ("columns/plan.h", "(int(blockIdx.x) % params.ctas) * kPlanWarps", "0")
    program = emulation.build(emulation.source(tmp_path, fault), name, "64", tmp_path / "run", LONG)
    with pytest.raises(AssertionError):
        emulation.check(program, ((5, 0),), **LONG)


@pytest.mark.parametrize("name", PASSES)
def test_a_mask_that_hides_nothing_has_the_bits_of_the_call_without_it(tmp_path, programs_of, name):
    program = emulation.build(emulation.source(tmp_path), name, "128", tmp_path / "program", only=dict(mask="any"))
    for mask in ("full", "causal"):
        call = dict(mask=mask, seqlen_q=400, heads=4, kv_heads=2, batch=2)
        with_columns = emulation.check(programs_of(name)["128"], ((3, 0),), **call, columns="nothing")
        assert with_columns == emulation.check(program, ((3, 0),), **call)


@pytest.mark.parametrize("row", ROWS)
def test_the_row_of_a_nan_query_is_nan(programs_of, row):
    """Also where every KV tile of the row has keys that the row does not see."""
    call = dict(columns="documents", document=70, mask="causal", seqlen_q=300)
    for query in (0, 75, 299):
        emulation.check(programs_of("forward")[row], ((3, 0),), **call, nan_query=query)


def test_which_rows_a_value_spoils_does_not_depend_on_the_gpu(tmp_path, programs_of):
    """Query tiles have as many rows on a GPU with few heads for many SMs. Queries 320 to 383 see KV tiles before and
    after the value's, which is loaded for queries before 320."""
    rule = "if (p.mask.kind == MaskKind::kColumns) return;"
    csrc = emulation.source(tmp_path, ("placement/forward_tiles.h", rule, ""))
    call = dict(columns="prefix", document=160, mask="causal", seqlen_q=640, nan_value=170, nan_values=1)
    emulation.check(programs_of("forward")["128"], MACHINES, **call)
    faulty = emulation.build(csrc, "forward", "128", tmp_path / "program", only=call)
    with pytest.raises(AssertionError):
        emulation.check(faulty, MACHINES, **call)


@pytest.mark.parametrize("row", ROWS)
def test_a_value_spoils_no_block_of_queries_that_sees_nothing_of_its_kv_tile(programs_of, row):
    call = dict(columns="documents", mask="causal", seqlen_q=640, nan_values=1)
    for document, value in ((64, 70), (64, 130), (90, 10), (190, 150), (190, 191)):
        emulation.check(programs_of("forward")[row], ((3, 0),), **call, document=document, nan_value=value)


@pytest.mark.parametrize("row", ["64", "128"])
def test_whoever_adds_last_may_finish_dq(programs_of, row):
    """Among the query tiles are some that no KV tile adds to."""
    calls = [
        dict(columns=kind, mask="causal", seqlen_q=500, seqlen_k=400, heads=2, kv_heads=1, document=90)
        for kind in KINDS
    ] + [dict(columns="random", per_key=4, pack="130:130,1:40,200:0,0:7,333:333", heads=2)]
    for call in calls:
        found = {
            emulation.check(programs_of("backward")[row], ((1, 0), (4, 2)), **call, finishes_dq=choice)
            for choice in (0, 1)
        }
        assert len(found) == 1


# The last query tile sees the first KV tiles and the last ones, and none of those between, which fill a word.
LONG = dict(columns="prefix", document=300, mask="causal", seqlen_q=8500)


def test_words_without_live_tiles_are_passed_over(programs):
    emulation.check(programs["64"], ((3, 0),), **LONG)


# More KV tiles than the plan has warps.
MANY_KEYS = dict(columns="random", mask="full", per_key=4, heads=2, mask_heads=2)
MANY_TILES = [dict(seqlen_q=100, seqlen_k=2700, batch=2), dict(pack="100:2700,1:40,0:7,30:1500")]


@pytest.mark.parametrize("shape", MANY_TILES, ids=str)
def test_warps_plan_several_tiles(programs, shape):
    emulation.check(programs["64"], ((1, 0), (132, 2)), **MANY_KEYS, **shape)


@pytest.mark.parametrize("name", PASSES)
def test_a_plan_whose_warps_do_not_wait_is_found(tmp_path, name):
    call = MANY_KEYS | MANY_TILES[0]
    csrc = emulation.source(tmp_path, ("columns/plan.h", "__syncthreads();", ""))
    program = emulation.build(csrc, name, "64", tmp_path / "run", call)
    with pytest.raises(AssertionError):
        emulation.check(program, ((132, 0),), **call)


SPOILED = dict(document=64, seqlen_q=500, nan_value=130, nan_values=1)


@pytest.mark.parametrize(
    "file, right, wrong, kind",
    [
        ("columns/plan.h", "extend(tiles.of_part[part], own,", "extend(tiles.of_part[part], live,", SPOILED),
        ("columns/plan.h", "((own & -own) - 1)", "(own & -own)", {}),  # the first tile of a part is left out
        ("columns/plan.h", "~0u >> __clz(own)", "~0u >> 1 >> __clz(own)", {}),  # the last tile of a part is left out
        ("columns/plan.h", "= __ballot_sync(0xffffffff, is_hidden)", "= 0", {}),
        ("columns/plan.h", "hidden.hides_any(parts[part].queries)", "hidden.hides_all(parts[part].queries)", {}),
        ("forward/live_walk.h", "word.hidden[warpgroup]", "word.hidden[1]", {}),
        ("forward/live_walk.h", "~(~0u >> __clz(to_mask))", "~(~0u >> 1 >> __clz(to_mask))", {}),
        ("forward/live_walk.h", "seen_whole.end() - first", "seen_whole.end() + 1 - first", {}),
        ("forward/rows.h", "Variant::kHasColumns ? live : ", "Variant::kHasColumns ? of_tile : ", SPOILED),
    ],
)
def test_faults_of_the_forward_are_found(tmp_path, file, right, wrong, kind):
    call = dict(columns="documents", mask="causal", document=70, seqlen_q=500, heads=2, kv_heads=1) | kind
    csrc = emulation.source(tmp_path, (file, right, wrong))
    program = emulation.build(csrc, "forward", "64", tmp_path / "run", call)
    with pytest.raises(AssertionError):
        emulation.check(program, ((1, 0),), **call)


@pytest.mark.parametrize(
    "file, right, wrong",
    [
        ("backward/columns.h", "word.live & (own - 1)", "word.live & own"),  # no rank is 0
        ("columns/plan.h", " && !hidden.hides_all(queries)", ""),  # ranks that never come
        ("contract/columns.h", "visited.count - low.count - high.count", "visited.count - low.count"),
    ],
)
def test_faults_are_found(tmp_path, file, right, wrong):
    call = dict(columns="documents", document=70, seqlen_q=800, heads=2, kv_heads=1)
    csrc = emulation.source(tmp_path, (file, right, wrong))
    program = emulation.build(csrc, "backward", "64", tmp_path / "run", call)
    with pytest.raises(AssertionError):
        emulation.check(program, ((1, 0),), **call)
