"""DASH_ATTN_CHECK=1: lengths are read and checked before an op is called, where an error on the device would come."""

import os
import subprocess
import sys

import pytest
import torch
from interface_support import VARLEN_FUNCTIONS
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_attn import checks, flash_attn_varlen_func, flash_attn_with_kvcache, packs
from dash_attn.compat import flash_attn_2, flash_attn_3

GOOD = (0, 4, 9)
BAD = {"decreasing": (0, 7, 5), "past the end": (0, 4, 10), "before the start": (-1, 4, 9)}
ROWS = r"^cu_seqlens_{} must hold non-decreasing offsets from 0 to 9, the number of rows, got \[{}\]$"


def t(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Values are read because the variable asks for it; the op reads none."""

    class OpCalled(Exception):
        pass

    def sequences(*_):
        raise OpCalled

    monkeypatch.setattr(packs, "sequences", sequences)
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)
    return OpCalled


@pytest.mark.parametrize("offsets", BAD.values(), ids=BAD)
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("function", VARLEN_FUNCTIONS, ids=lambda f: f.__name__)
def test_public_functions(function, side, offsets, as_on_a_gpu, monkeypatch):
    given = {"q": t(9, 2, 8), "k": t(9, 2, 8), "v": t(9, 2, 8), "kv": t(9, 2, 2, 8), "qkv": t(9, 3, 2, 8)}
    given |= {"max_seqlen_q": 5, "max_seqlen_k": 5, "max_seqlen": 5}
    given |= {"cu_seqlens_q": int32(*GOOD), "cu_seqlens_k": int32(*GOOD), f"cu_seqlens_{side}": int32(*offsets)}
    given["cu_seqlens"] = int32(*offsets)
    arguments = {name: given[name] for name in VARLEN_FUNCTIONS[function][0]}
    named = "q" if "qkv" in arguments else side
    with pytest.raises(ValueError, match=ROWS.format(named, ", ".join(map(str, offsets)))):
        function(**arguments)
    for reads in (True, False):
        monkeypatch.setattr(checks, "CHECKS_VALUES", reads)
        with pytest.raises(as_on_a_gpu):
            function(**arguments | ({} if not reads else {n: int32(*GOOD) for n in arguments if n.startswith("cu")}))


def test_lengths_in_use():
    q, offsets = t(9, 2, 8), int32(*GOOD)
    with pytest.raises(ValueError, match=r"^seqused_k must hold numbers from 0 to the lengths in cu_seqlens_k, "):
        next(iter(VARLEN_FUNCTIONS))(q, q, q, offsets, offsets, 5, 5, seqused_k=int32(4, 6))


@pytest.mark.parametrize("function", VARLEN_FUNCTIONS, ids=lambda f: f.__name__)
def test_longest_sequences_with_dropout(function, as_on_a_gpu):
    given = {"q": t(9, 2, 8), "k": t(9, 2, 8), "v": t(9, 2, 8), "kv": t(9, 2, 2, 8), "qkv": t(9, 3, 2, 8)}
    given |= {name: int32(*GOOD) for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens")}
    given |= {name: 5 for name in ("max_seqlen_q", "max_seqlen_k", "max_seqlen")}
    arguments = {name: given[name] for name in VARLEN_FUNCTIONS[function][0]}
    state = torch.get_rng_state()
    for name in [name for name in arguments if name.startswith("max")]:
        message = f"^{name} must be at least the length of the longest sequence with dropout, 5, got 4$"
        with pytest.raises(ValueError, match=message):
            function(**arguments | {name: 4}, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    with pytest.raises(as_on_a_gpu):
        function(**arguments, dropout_p=0.5)


@pytest.mark.parametrize("module, function", [
    (flash_attn_2, "_flash_attn_varlen_forward"), (flash_attn_2, "_flash_attn_varlen_backward"),
    (flash_attn_3, "_flash_attn_forward"), (flash_attn_3, "_flash_attn_backward"),
])  # fmt: skip
def test_private_functions(module, function):
    q, bad, good = t(9, 2, 8), int32(0, 7, 5), int32(*GOOD)
    tensors = {"q": q, "k": q, "v": q, "cu_seqlens_q": bad, "cu_seqlens_k": good, "max_seqlen_q": 5, "max_seqlen_k": 5}
    if "backward" in function:
        tensors |= {"dout": q, "out": q, "softmax_lse": torch.zeros(2, 9)} | {name: None for name in ("dq", "dk", "dv")}
    if module is flash_attn_2:
        tensors |= {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
        if "backward" in function:
            tensors |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
            tensors |= {"deterministic": False}
    with pytest.raises(ValueError, match=ROWS.format("q", "0, 7, 5")):
        getattr(module, function)(**tensors)


def test_tensors_without_values(monkeypatch):
    """Fake tensors and those of torch.vmap pass the checks of a pack and of a cache."""
    monkeypatch.undo()
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)

    def pack(q, cu_seqlens):
        return flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 5, 5)

    def cache(q, cache_seqlens):
        k_cache = t(2, 8, 2, 8)
        return flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=cache_seqlens)

    with FakeTensorMode():
        assert pack(t(9, 2, 8), int32(*GOOD)).shape == (9, 2, 8)
        assert cache(t(2, 3, 2, 8), int32(3, 4)).shape == (2, 3, 2, 8)
    for in_dims in ((0, 0), (0, None), (None, 0)):
        of_pack, of_cache = [
            tuple(x if dim is None else x.expand(3, *x.shape) for x, dim in zip(tensors, in_dims))
            for tensors in ((t(9, 2, 8), int32(*GOOD)), (t(2, 3, 2, 8), int32(3, 4)))
        ]
        assert torch.vmap(pack, in_dims)(*of_pack).shape == (3, 9, 2, 8)
        assert torch.vmap(cache, in_dims)(*of_cache).shape == (3, 2, 3, 2, 8)


def test_a_tensor_of_no_dimensions():
    x, offsets = torch.tensor(0.0, dtype=torch.bfloat16), int32(*GOOD)
    with pytest.raises(ValueError, match=r"^q must have shape .*, got 0 dimensions: \(\)$"):
        flash_attn_varlen_func(x, x, x, offsets, offsets, 5, 5)


class OnCuda(torch.Tensor):
    device = torch.device("cuda")


@pytest.mark.slow
def test_devices_and_the_variable(monkeypatch):
    found = {}
    with FakeTensorMode():
        fake = torch.zeros(()), torch.zeros((), device="cuda")
    tensors = torch.zeros(()), torch.zeros(()).as_subclass(OnCuda), torch.zeros((), device="meta"), *fake
    for reads in (False, True):
        monkeypatch.setattr(checks, "CHECKS_VALUES", reads)
        found[reads] = [checks.reads_values(x) for x in tensors]
    assert found == {False: [True, False, False, False, False], True: [True, True, False, False, False]}
    for value, reads in (("1", "True"), ("0", "False"), ("", "False")):
        code = "import dash_attn; print(dash_attn.checks.CHECKS_VALUES)"
        environment = {**os.environ, "DASH_ATTN_CHECK": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout == f"{reads}\n", done.stderr
