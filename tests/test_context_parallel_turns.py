"""Which stream waits for which where tasks take turns, on streams that only keep count."""

import contextlib
import types

import pytest
import torch

from dash_attn.distributed import turns as streams_in_turn
from dash_attn.distributed.turns import Turns


class Stream:
    def __init__(self, *_):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)

    def wait_event(self, event):
        self.waited_for.append(event)


class Event:
    def record(self):
        self.stream = Streams.current[-1]


class Streams:
    """In the place of torch.cuda."""

    current: list[Stream] = []


@pytest.fixture
def outer(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(Streams, "current", [stream])

    @contextlib.contextmanager
    def enter(inner):
        Streams.current.append(inner)
        try:
            yield
        finally:
            Streams.current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Streams.current[-1])
    streams_in_turn._streams_of.cache_clear()
    yield stream
    streams_in_turn._streams_of.cache_clear()


def turns_of_a_gpu():
    made_on = []

    def new_empty(size, dtype):
        made_on.append(Streams.current[-1])
        return torch.empty(size, dtype=dtype)

    return Turns(types.SimpleNamespace(is_cuda=True, device="cuda", new_empty=new_empty)), made_on


def test_turns_follow_what_was_before_and_are_waited_for(outer):
    turns, _ = turns_of_a_gpu()
    used = []
    with turns:
        for _ in range(4):
            with turns.turn():
                used.append(Streams.current[-1])
        with turns.message():
            used.append(Streams.current[-1])
    assert used[0] is used[2] and used[1] is used[3] and len(set(map(id, used))) == 3 and outer not in used
    assert all(stream.waited_for == [outer] for stream in used)
    assert {id(stream) for stream in outer.waited_for} == set(map(id, used))


def test_streams_are_always_the_same(outer):
    used = []
    for _ in range(2):
        with turns_of_a_gpu()[0] as turns:
            for _ in range(2):
                with turns.turn():
                    used.append(Streams.current[-1])
    assert len(set(map(id, used))) == 2


def test_turns_are_waited_for_after_an_error(outer):
    turns, _ = turns_of_a_gpu()
    with pytest.raises(MemoryError), turns, turns.turn():
        turns.give_back(torch.empty(3), lambda: pytest.fail("what is lost is not waited for"))
        raise MemoryError
    assert len(outer.waited_for) == 3


def test_space_is_the_outer_streams_and_comes_back_oldest_first(outer):
    turns, made_on = turns_of_a_gpu()
    with turns:
        with turns.turn():
            spaces = [turns.take(3, torch.float32) for _ in range(3)]
            done = turns.begun()
            of_turn = Streams.current[-1]
            for space in spaces:
                turns.give_back(space.x, done)
        with turns.turn():
            assert turns.take(3, torch.bfloat16).x.dtype == torch.bfloat16
            again, new = (turns.take(3, torch.float32) for _ in range(2))
            again.wait()
            new.wait()
            assert again.x is spaces[0].x and all(new.x is not space.x for space in spaces)
            (event,) = Streams.current[-1].waited_for[1:]
            assert event.stream is of_turn
    assert made_on == [outer] * 5
    # What was given back and not taken again is waited for by the outer stream too.
    assert event in outer.waited_for


def test_a_cpu_has_nothing_to_wait_for():
    with Turns(torch.empty(0)) as turns, turns.turn():
        spaces = [turns.take(5, torch.float32) for _ in range(3)]
        for space in spaces:
            turns.give_back(space.x, turns.begun())
        assert turns.take(5, torch.float32).x is spaces[0].x
