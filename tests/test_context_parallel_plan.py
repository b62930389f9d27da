"""The plan of context parallelism beyond the KV heads: nothing waits in a cycle, and every sum has its one order."""

import collections
import itertools

import pytest

from dash_attn import schedule
from dash_attn.distributed import rows_of_rank
from dash_attn.distributed.plan import make_plan

LAYOUTS = ("contiguous", "zigzag")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (700, 0)},
    "window on both sides": {"window": (300, 500)},
    "chunks": {"causal": True, "attention_chunk": 1024},
}


def play(plan):
    """Runs the actions over one queue of messages at each rank, as NCCL's is: a message moves when both ends have begun
    it and all that either has begun before it have moved. The order in which tasks ran."""
    position, begun = [0] * plan.ranks, [collections.deque() for _ in range(plan.ranks)]
    moved, ran = set(), []
    went_on = True
    while went_on:
        went_on = False
        for rank, actions in enumerate(plan.actions):
            while position[rank] < len(actions):
                kind, what = actions[position[rank]]
                if kind == "run":
                    assert plan.rank_of(what) == rank
                    if not moved.issuperset(plan.needs.get(what, [])):
                        break
                    ran.append(what)
                else:
                    assert rank == (what.sender if kind == "send" else what.receiver) and what.sender != what.receiver
                    assert kind == "receive" or what.of == ran[-1], "a message is sent directly behind its task"
                    begun[rank].append(what)
                position[rank] += 1
                went_on = True
        for queue in begun:
            while queue:
                ends = [begun[queue[0].sender], begun[queue[0].receiver]]
                if not all(end and end[0] == queue[0] for end in ends):
                    break
                moved.add(queue[0])
                for end in ends:
                    end.popleft()
                went_on = True
    waiting = [actions[at] for at, actions in zip(position, plan.actions) if at < len(actions)]
    assert not waiting and not any(begun), f"ranks wait for ever: {waiting[:3]}, {[list(x)[:1] for x in begun]}"
    return ran


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_waits_for_ever_and_orders_are_kept(layout, mask):
    for ranks, kv_heads in [*itertools.product((1, 2, 3, 5, 8), (1, 3)), (13, 1), (24, 1), (64, 1)]:
        seqlen = 512 * ranks if ranks % 3 else 512 * ranks + 77
        plan = make_plan(seqlen, seqlen, ranks, layout=layout, heads=2 * kv_heads, kv_heads=kv_heads, **MASKS[mask])
        ran = play(plan)
        assert len(ran) == len(set(ran)) == len(plan.work) and set(ran) == set(plan.work)
        place = {task: number for number, task in enumerate(ran)}
        for order in (*plan.chains.values(), *plan.dq_orders.values()):
            assert [place[task] for task in order] == sorted(place[task] for task in order)
        for order in plan.dq_orders.values():
            assert len({plan.rank_of(task) for task in order}) == 1


def test_messages_out_of_order_would_be_noticed():
    plan = make_plan(4096, 4096, 4, layout="zigzag", causal=True)
    actions = plan.actions[1]
    first, second = [number for number, action in enumerate(actions) if action.kind == "receive"][:2]
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(AssertionError, match="ranks wait for ever"):
        play(plan)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(1001, 2305), (2305, 1001), (101, 4001)])
def test_lengths_that_differ(layout, lengths):
    for ranks in (2, 3, 4):
        play(make_plan(*lengths, ranks, layout=layout, causal=True))


def of_kernel(policy, seqlen, mask, plan, heads):
    """For one head: the chunks of queries of each KV tile in the order of visits, and the other way round for adds."""
    problem = schedule.problem(policy, seqlen, seqlen, heads=heads, kv_heads=1, **({"causal": False} | mask))
    borders = [run for rank in range(plan.ranks) for run in rows_of_rank(seqlen, rank, plan.ranks, plan.layout)]
    borders = sorted(run for run in borders if len(run))

    def chunk(tile, rows):
        return next(number for number, run in enumerate(borders) if run.start <= tile * rows < run.stop)

    def along(order, own, other):
        return [
            (chunk(tile, own), [key for key, _ in itertools.groupby(chunk(x, other) for x in row)])
            for tile, row in enumerate(order)
        ]

    visits = along(schedule.visit_order(policy, problem), problem.tile_k, problem.tile_q)
    adds = along(schedule.add_order(policy, problem), problem.tile_q, problem.tile_k)
    return problem, visits, adds


@pytest.mark.parametrize("policy", ["descending", "spt", "order_free"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_is_the_schedules(policy, mask, layout):
    """Tile by tile: where a KV tile goes from one chunk of queries to the next, its chain does, and dQ likewise."""
    for seqlen, ranks, heads in [(4096, 2, 1), (3001, 3, 4), (8192, 4, 4), (1009, 4, 8)]:
        plan = make_plan(seqlen, seqlen, ranks, layout=layout, heads=heads, kv_heads=1, schedule=policy, **MASKS[mask])
        problem, visits, adds = of_kernel(policy, seqlen, MASKS[mask], plan, heads)
        together = schedule.heads_together(policy, problem)
        assert len({split for _, split, _ in plan.chains}) == problem.splits
        for chain in plan.chains.values():
            of_head = [task for task in chain if task.first_head == chain[0].first_head]
            assert chain[0].heads == (problem.heads_per_split if together else 1)
            reached = set()
            for j, of_tile in visits:
                if j == chain[0].kv_chunk:
                    reached |= set(of_tile)
                    order = [task.query_chunk for task in of_head]
                    assert [i for i in order if i in of_tile] == of_tile
            assert {task.query_chunk for task in of_head} == reached
            # One query head after the other, or all of a split at once.
            assert [task.first_head for task in chain] == sorted(task.first_head for task in chain)
        for order in plan.dq_orders.values():
            for i, of_tile in adds:
                if i == order[0].query_chunk:
                    assert [task.kv_chunk for task in order if task.kv_chunk in of_tile] == of_tile


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64])
def test_zigzag_gives_every_rank_as_much_and_ends_with_the_owner(ranks):
    plan = make_plan(1024 * ranks, 1024 * ranks, ranks, layout="zigzag", causal=True)
    work = [sum(plan.work[task] for task in plan.tasks(rank)) for rank in range(ranks)]
    assert max(work) == min(work)
    kinds = {action.what.kind for actions in plan.actions for action in actions if action.kind == "send"}
    assert kinds <= {"sums", "total"}, "the last rank of a chain owns its chunk: there is no way back"


def test_results_go_to_the_rank_that_owns_the_keys():
    plan = make_plan(4096, 4096, 4)
    results = [a.what for actions in plan.actions for a in actions if a.kind == "send" and a.what.kind == "result"]
    assert {(message.receiver, message.of.kv_chunk) for message in results} == {(1, 1), (2, 2), (3, 3)}
    assert {message.sender for message in results} == {0}


def test_the_plan_is_a_function_of_its_arguments():
    shape = dict(layout="zigzag", heads=8, kv_heads=2, causal=True)
    assert make_plan(4096, 4096, 4, **shape).actions == make_plan(4096, 4096, 4, **shape).actions
    # How long a message takes moves work in time; every sum keeps its order.
    late = make_plan(4096, 4096, 4, **shape, hop_work=1e6)
    assert late.chains == make_plan(4096, 4096, 4, **shape).chains
    play(late)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((4096, 4096, 0), {}, "ranks must be at least 1, got 0"),
        ((4096, 4096, 2), {"layout": "striped"}, "layout must be one of"),
        (
            (4096, 4096, 2),
            {"schedule": "shift"},
            "schedule must be a policy with visits in one direction, whole KV tiles .*, got 'shift'",
        ),
    ],
)
def test_what_a_plan_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments, **options)


@pytest.mark.slow
def test_long_sequences_are_cut_at_fewer_places():
    plan = make_plan(2**20 + 1, 2**21 + 201, 2, layout="zigzag", causal=True)
    play(plan)
    assert {len(chain) for chain in plan.chains.values()} <= {1, 2, 3, 4}
