"""Masks as keyword arguments of `dash_attn._schedule`, `dash_attn.schedule`, `dash_attn.reference` and
tests/float64_reference.py, and as those of the public functions."""

FULL, CAUSAL = {"causal": False}, {"causal": True}


def window(left, right, attention_chunk=0, causal=False):
    return {"causal": causal, "window": (left, right), "attention_chunk": attention_chunk}


# Of the window kernel, each of its own shape.
WINDOWS = [
    window(0, 0), window(5, 3), window(17, -1), window(-1, 4), window(20, 7, causal=True), window(3, 1000),
    window(1000, 1000), window(-1, -1, 16), window(-1, -1, 16, causal=True), window(10, 2, 24), window(-1, -1, 1),
]  # fmt: skip


def name_of(mask):
    left, right = mask.get("window", (-1, -1))
    chunk = mask.get("attention_chunk", 0)
    words = ["causal"] if mask["causal"] else []
    words += [f"({left},{right})"] if (left, right) != (-1, -1) else []
    words += [f"chunk{chunk}"] if chunk else []
    return "-".join(words) or "full"


def public(mask):
    """The same mask as arguments of the public functions."""
    return {"window_size" if name == "window" else name: value for name, value in mask.items()}


def masks(longest=1500):
    """A hypothesis strategy: all kinds, sides from none to wider than any sequence, chunks of all sizes."""
    from hypothesis import strategies as st

    side = st.one_of(st.just(-1), st.integers(0, 5), st.integers(0, longest), st.integers(2**30, 2**40))
    chunk = st.one_of(st.just(0), st.just(0), st.integers(1, 9), st.integers(1, longest))
    return st.one_of(
        st.sampled_from([FULL, CAUSAL]),
        st.builds(window, side, side, chunk, st.booleans()),
    )
