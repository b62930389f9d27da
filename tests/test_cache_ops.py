"""The ops behind flash_attn_with_kvcache, on CPU and meta tensors: what they promise torch, and that they are all that
a call runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn import flash_attn_with_kvcache

# Of torch's ops, those that launch nothing on a GPU.
VIEWS = {
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "slice",
    "transpose",
    "view",
    "alias",
}
VIEWS |= {"_unsafe_view", "unsqueeze"}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("arguments", [
    (int32(3, 1), None, None), (int32(3, -1), int32(0, 3, 4), int32(0, 1, 2, 3).view(2, 2)),
], ids=["plain", "paged"])  # fmt: skip
def test_opcheck_of_append(arguments):
    tensors = bf16(4, 5, 2, 32), bf16(4, 5, 2, 32, seed=1), bf16(4, 2, 32, seed=2), bf16(4, 2, 32, seed=3)
    torch.library.opcheck(torch.ops.dash_attn.append.default, (*tensors, *arguments, 0))


@pytest.mark.parametrize("cache", [
    {"cu_seqlens_q": None, "block_table": None, "seqused_k": int32(3, 5)},
    {"cu_seqlens_q": int32(0, 1, 4), "block_table": int32(0, 1, 2, 3).view(2, 2), "seqused_k": int32(3, 9)},
], ids=["plain", "paged"])  # fmt: skip
def test_opcheck_of_the_forward(cache):
    rest = {"softmax_scale": 0.3, "causal": True, "window_left": -1, "window_right": -1, "attention_chunk": 0}
    rest |= {"sm_margin": 0, "sinks": None, "alibi_slopes": None, "softcap": 0.0, "seqused_q": None}
    tensors = bf16(4, 4, 32), bf16(20, 2, 32, seed=1), bf16(20, 2, 32, seed=2)
    torch.library.opcheck(
        torch.ops.dash_attn.forward_of_cache.default, tensors, {**cache, **rest, "page_rows": 5, "page_distance": 5}
    )


def call_append(k_cache, k):
    torch.ops.dash_attn.append.default(k_cache, bf16(4, 5, 2, 32), k, bf16(4, 2, 32), int32(3, 1), None, None, 0)


def call_forward(k_cache, q):
    rest = (None, None, None, int32(3, 5), 5, 5, 0.3, True, -1, -1, 0, 0, None, None, 0.0)
    torch.ops.dash_attn.forward_of_cache.default(q, k_cache.flatten(0, 1), bf16(20, 2, 32), *rest)


@pytest.mark.parametrize("call", [call_append, call_forward])
@pytest.mark.parametrize("of_cache", [True, False])
def test_the_ops_have_no_derivative(call, of_cache):
    tensors = [bf16(4, 5, 2, 32), bf16(4, 2, 32)]
    before = tensors[0].clone()
    tensors[not of_cache].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^dash_attn::\w+ has no derivative: call it under torch.no_grad"):
        call(*tensors)
    tensors[not of_cache].requires_grad_(False)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(
            tensors[not of_cache], torch.ones(tensors[not of_cache].shape).bfloat16()
        )
        with pytest.raises(
            NotImplementedError, match="^attention has no derivative in forward mode.*detach its inputs$"
        ):
            call(*((dual, tensors[1]) if of_cache else (tensors[0], dual)))
    assert torch.equal(tensors[0], before)
    with torch.no_grad():
        call(tensors[0].requires_grad_(), tensors[1])


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _, name, _ = str(func).split(".")
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["plain", "indexed", "pages of 64", "pages of 16", "pages of 6", "pages of 1"])
@pytest.mark.parametrize("appends", [False, True])
def test_a_step_of_decoding_runs_no_op_of_torch(form, appends):
    """Each would be a launch, which costs as much time as reading megabytes of keys."""
    rows = int(form.split()[-1]) if "pages" in form else 192
    arguments = {"block_table": int32(*range(2 * 192 // rows)).view(2, -1)} if "pages" in form else {}
    arguments |= {"cache_batch_idx": int32(1, 0)} if form == "indexed" else {}
    tensors = bf16(2, 1, 4, 64), bf16(2 * 192 // rows, rows, 2, 64), bf16(2 * 192 // rows, rows, 2, 64)
    new = (bf16(2, 1, 2, 64), bf16(2, 1, 2, 64)) if appends else ()
    arguments = {name: x.to("meta") for name, x in {**arguments, "cache_seqlens": int32(3, 5)}.items()}
    on_meta = [x.to("meta") for x in (*tensors, *new)]
    with Ops() as ops:
        flash_attn_with_kvcache(*on_meta, causal=True, **arguments)
    # Before anything is written, the op's checks run on tensors without values.
    assert ops.names == (["forward", "append", "forward_of_cache"] if appends else ["forward_of_cache"])


# Two heads of 256 queries are 512 rows. Three heads share no tile.
IN_PLACE = [{}, {"causal": True}, {"heads": 6, "seqlen_q": 512}, {"head_dims": (192, 128)}, {"window_size": (-1, 0)}]
COPIED = [
    {"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}, {"window_size": (8, 0)}, {"seqlen_q": 257},
    {"heads": 6, "seqlen_q": 513}, {"head_dims": (64, 136)}, {"head_dims": (200, 128)},
]  # fmt: skip


@pytest.mark.parametrize("is_copied, arguments", [(False, x) for x in IN_PLACE] + [(True, x) for x in COPIED], ids=str)
def test_which_calls_copy_pages_that_cut_boxes(is_copied, arguments):
    """No kernel for tall query tiles loads single rows of pages."""
    arguments = {"seqlen_q": 256, "heads": 4, "head_dims": (64, 64), "cache_seqlens": int32(3, 5), **arguments}
    seqlen_q, heads, (qk, v) = (arguments.pop(name) for name in ("seqlen_q", "heads", "head_dims"))
    for page_rows in (6, 16):
        pages = 2 * 96 // page_rows
        tensors = [bf16(2, seqlen_q, heads, qk), bf16(pages, page_rows, 2, qk), bf16(pages, page_rows, 2, v)]
        named = {"block_table": torch.arange(pages, dtype=torch.int32).view(2, -1), **arguments}
        named = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in named.items()}
        with Ops() as ops:
            flash_attn_with_kvcache(*(x.to("meta") for x in tensors), **named)
        assert ("forward_of_cache" in ops.names) == (page_rows == 16 or not is_copied)
