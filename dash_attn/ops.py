"""The torch.library ops: `dash_attn::forward` and `dash_attn::backward`, and those with a derivative that models call.

    forward(q, k, v, *pack, softmax_scale, *mask, sm_margin=0, sinks=None, alibi_slopes=None, softcap=0.0, *dropout)
        -> (out, softmax_lse)
    backward(dout, q, k, v, out, softmax_lse, dq!, dk!, dv!, *pack, softmax_scale, *mask, schedule, sm_margin,
             sinks=None, alibi_slopes=None, dsoftmax_lse=None, dsinks!=None, softcap=0.0, *dropout) -> ()

    pack: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, all None in a dense batch
    mask: causal, window_left, window_right, attention_chunk; -1 is no window on that side, chunk 0 no chunks
    dropout: dropout_bits=None, rng_state=None, dropout_p=0.0, max_seqlen_q=None, max_seqlen_k=None

In a dense batch q and dq are (batch, seqlen_q, heads, head_dim), k and dk (batch, seqlen_k, kv_heads, head_dim), v and
dv (batch, seqlen_k, kv_heads, value_head_dim), out and dout (batch, seqlen_q, heads, value_head_dim), all bf16 or all
fp16, of any strides, each head dim a multiple of 8 up to 256. softmax_lse is fp32 (batch, heads, seqlen_q), natural
logarithm, +inf (-inf is taken too) for a query that sees no key; such a query has output 0 and gradients 0, as every
sum over no key or no query is 0. "order_free" builds on softmax_lse that is the forward's, or merged from several. out
is contiguous. dq, dk and dv share no memory with each other nor with what is read. `schedule` is a policy of
`dash_attn.schedule` or "auto", `sm_margin` the number of SMs to leave to other kernels.

In a pack total_q stands for (batch, seqlen_q) and total_k for (batch, seqlen_k), softmax_lse is (heads, total_q),
cu_seqlens_* are int32 (batch + 1,), seqused_* None or int32 (batch,), contiguous and on q's device. Sequence b starts
at row cu_seqlens[b] and has seqused[b] rows, or those up to cu_seqlens[b + 1]. Rows of no sequence have output 0,
log-sum-exp +inf and gradients 0, and are not looked at.

softcap is at least 0, where 0 is none. alibi_slopes are fp32 (heads,) or (batch, heads), and not beside a softcap.
sinks are fp32 (heads,), the log-sum-exp counts them, and is the sink above -inf of a query that sees no key.
dsoftmax_lse, the gradient of the log-sum-exp, is like it, and not looked at where that is infinite. dsinks, fp32
(heads,) and contiguous, is written where it is given; it is summed over the queries of each sequence by a tree that its
length fixes, and then over the sequences in their order. `dash_attn.reference` has the formulas.

With dropout_p above 0, the probability of dropping an element, there are dropout_bits, those of
`dash_attn.dropout.dropout_bits` for the call's query heads and lengths (of a pack, for those of its longest sequence),
or rng_state, int64 (2,) or (batch, 2), of which they are made: the default mapping and rounds, sequence b having the
number b under one state and 0 under its own. Both passes are given the same. A pack with rng_state takes max_seqlen_q
and max_seqlen_k, ints and no less than any of its sequences has, which are looked at in no other call: on a GPU each
pass makes bits of so many rows and keeps none, batch * heads * max_seqlen_q * max_seqlen_k / 8 bytes, and a sequence
beyond them is an error on the device, which stops before bits are read. On a GPU neither a softcap nor slopes go with
dropout.

A row's output depends on its query, the keys and values it sees and their number; gradients on the schedule besides;
and neither on `sm_margin`, the device's SMs or the other sequences of the batch or pack, to the last bit. Where K or V
is not finite, a row may be NaN for a key of a KV tile that it, or under a window a row near it, sees other keys of
(docs/forward.md).

    attention(q, k, v, softmax_scale, causal, schedule, sm_margin, window_left=-1, window_right=-1, attention_chunk=0,
              cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, sinks=None, alibi_slopes=None,
              softcap=0.0, *dropout) -> (out, softmax_lse)
    attention_kvpacked(q, kv, softmax_scale, ...)    attention_qkvpacked(qkv, num_heads_q, softmax_scale, ...)

(the last of which has cu_seqlens, seqused and max_seqlen for both sides) are the two as one differentiable function of
what `dash_attn.interface` is given: of q, k, v and sinks, which may be of any float dtype there, to both outputs. All
of them are C++ (csrc/bindings/autograd.cpp) and run `dash_attn_C::forward` and `dash_attn_C::backward`, the kernels,
which take what TMA can address and a positive scale. Their CUDA implementation is in `_C`; the CPU's is the reference,
below.

Two more ops are for torch alone. `flash_attn::_dash_attn_forward` is `forward` by another name, which the
differentiable ops call after `name_forward(True)`. `_gradients` is `backward` with results, for gradients that a vmap
batches.
"""

import pathlib
import warnings

import torch

from . import packs, reference
from . import schedule as _schedule
from .dropout import layout
from .tile_order import tile_order

HOPPER = (9, 0)
"""The compute capability of the GPUs that the kernels run on."""

_FOLDER = pathlib.Path(__file__).parent
# Written by setup.py where it leaves the kernels out: why.
_WITHOUT_KERNELS = "without_kernels.txt"
_BUILD_AGAIN = "install dash_attn again: `pip install --no-build-isolation .` in its source"
_ASKED_FOR = "DASH_ATTN_SKIP_CUDA=1"


def why_not_loaded(stem: str, absent: str, folder: pathlib.Path = _FOLDER) -> str | None:
    """Loads the package's compiled library `stem`. None, or why it cannot be: `absent` if it is not there."""
    found = sorted(folder.glob(f"{stem}*.so"))
    if not found:
        return f"{absent} (no {stem}*.so in {folder})"
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        return f"dash_attn must have one {stem}*.so in {folder}, got {names}: remove the stale ones"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        hint = "after a change of torch, install dash_attn again: pip install --no-build-isolation ."
        return f"{found[0]} cannot be loaded: {error.__cause__ or error} ({hint})"
    return None


def _forward_cpu(
    q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, softmax_scale,
    softcap, causal, window_left, window_right, attention_chunk, sm_margin, dropout_bits=None, rng_state=None,
    dropout_p=0.0,
):  # fmt: skip
    mask = {"causal": causal, "window": (window_left, window_right), "attention_chunk": attention_chunk}
    pack = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    sequences = packs.sequences(*pack, [q, out], [k, v], [softmax_lse], alibi_slopes)
    if cu_seqlens_q is not None:
        out.zero_()
        softmax_lse.fill_(torch.inf)
    kept = layout.Kept(dropout_bits, rng_state, dropout_p)
    for (q_rows, out_rows), (k_rows, v_rows), (lse,), slopes, number in sequences:
        assert lse is not None
        scores = {"softmax_scale": softmax_scale, "softcap": softcap, "alibi_slopes": slopes}
        keep = kept.of(number, q.shape[-2], q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        dropout = {"keep": keep, "dropout_p": dropout_p}
        results = reference.forward(q_rows, k_rows, v_rows, sinks=sinks, **scores, **mask, **dropout)
        for target, result in zip((out_rows, lse), results):
            target.copy_(result)


def _forward_of_pages_cpu(
    q, k, v, out, softmax_lse, cu_seqlens_q, seqused_q, block_table, seqused_k, page_rows, page_distance, sinks,
    alibi_slopes, softmax_scale, softcap, causal, window_left, window_right, attention_chunk, sm_margin,
):  # fmt: skip
    """Copies the keys of every sequence. Entries of the table past a sequence's keys are not looked at."""
    place = torch.arange(block_table.shape[1] * page_rows).expand(len(seqused_k), -1)
    row = block_table.repeat_interleave(page_rows, dim=1) * page_distance + place % page_rows
    row = row[place < seqused_k[:, None]]
    cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    _forward_cpu(
        q, k[row], v[row], out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, None, sinks, alibi_slopes,
        softmax_scale, softcap, causal, window_left, window_right, attention_chunk, sm_margin,
    )  # fmt: skip


def _backward_cpu(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes,
    dsoftmax_lse, dsinks, softmax_scale, softcap, causal, window_left, window_right, attention_chunk, schedule,
    sm_margin, dropout_bits=None, rng_state=None, dropout_p=0.0,
):  # fmt: skip
    mask = {"causal": causal, "window": (window_left, window_right), "attention_chunk": attention_chunk}
    group_size = q.shape[-2] // k.shape[-2]
    pack = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    of_queries, of_lse = [dout, q, out, dq], [softmax_lse, dsoftmax_lse]
    sequences = packs.sequences(*pack, of_queries, [k, v, dk, dv], of_lse, alibi_slopes)
    if cu_seqlens_q is not None:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    if dsinks is not None:
        dsinks.zero_()
    kept = layout.Kept(dropout_bits, rng_state, dropout_p)
    for sequence in sequences:
        (dout_rows, q_rows, out_rows, dq_rows), (k_rows, v_rows, dk_rows, dv_rows), (lse, dlse) = sequence[:3]
        if dsinks is not None:
            for of_sequence in reference.sink_gradient(dout_rows, out_rows, lse, sinks, dlse):
                dsinks += of_sequence
        if not sequence.has_keys:
            continue
        order = tile_order(
            _schedule.POLICIES[schedule],
            seqlen_q=q_rows.shape[1],
            seqlen_k=k_rows.shape[1],
            head_dim=q.shape[-1],
            value_head_dim=v.shape[-1],
            group_size=group_size,
            **mask,
        )
        scores = {"softmax_scale": softmax_scale, "softcap": softcap}
        scores |= {"alibi_slopes": sequence.alibi_slopes, "dsoftmax_lse": dlse}
        keep = kept.of(sequence.number, q.shape[-2], q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        dropped = {"keep": keep, "dropout_p": dropout_p, "order": order}
        results = reference.backward(dout_rows, q_rows, k_rows, v_rows, out_rows, lse, **scores, **mask, **dropped)
        for gradient, result in zip((dq_rows, dk_rows, dv_rows), results):
            gradient.copy_(result)


def _raiser(reason):
    def without_kernels(*_):
        raise RuntimeError(reason)

    return without_kernels


def why_left_out() -> str:
    """What the build noted where it left the kernels out; empty where it noted nothing."""
    note = _FOLDER / _WITHOUT_KERNELS
    return note.read_text().strip() if note.is_file() else ""


def _load_kernels() -> str | None:
    """None, or why CUDA tensors have no kernels; a warning says so where torch has CUDA and nobody asked for it."""
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    left_out = why_left_out()
    because = f", because {left_out} when it was built" if left_out else ""
    absent = (
        f"dash_attn was installed without its CUDA kernels{because}: CUDA tensors will raise, CPU tensors use the "
        "reference. To have them, set CUDA_HOME to a CUDA toolkit and run `pip install --no-build-isolation .` in "
        f"dash_attn's source (docs/install.md); {_ASKED_FOR} there says that they are not wanted"
    )
    reason = why_not_loaded("_C", absent)
    asked_for = left_out.startswith(_ASKED_FOR) and not list(_FOLDER.glob("_C*.so"))
    if reason is not None and not asked_for:
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return reason


def _load() -> str | None:
    absent = "dash_attn was installed without its ops: `pip install --no-build-isolation .` from its root"
    reason = why_not_loaded("_autograd", absent)
    if reason is not None:
        raise ImportError(reason)
    torch.library.impl("dash_attn_C::forward", "CPU", _forward_cpu)
    torch.library.impl("dash_attn_C::forward_of_pages", "CPU", _forward_of_pages_cpu)
    torch.library.impl("dash_attn_C::backward", "CPU", _backward_cpu)
    reason = _load_kernels()
    for op in ("forward", "forward_of_pages", "backward", "dropout_bits", "fingerprint_blocks"):
        name = f"dash_attn_C::{op}"
        # Kernels that were built before an op was there must not leave it to what serves any device.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            torch.library.impl(name, "CUDA", _raiser(reason or f"{name} is not in {_FOLDER}'s _C: {_BUILD_AGAIN}"))
    return reason


why_no_kernels = _load()
"""Why CUDA tensors raise in this process; None where the kernels are loaded."""
