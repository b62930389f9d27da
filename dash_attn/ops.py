"""The ops of torch.library: `dash_attn::forward`, `dash_attn::backward`, and the differentiable ops that models call.

    forward(q, k, v, *pack, softmax_scale, *mask, sm_margin=0, sinks=None, alibi_slopes=None, softcap=0.0, *dropout,
            startend_row_indices=None) -> (out, softmax_lse)
    forward_and_max_logits(...) -> (out, softmax_lse, max_logits)    with the arguments of forward
    backward(dout, q, k, v, out, softmax_lse, dq!, dk!, dv!, *pack, softmax_scale, *mask, schedule, sm_margin,
             sinks=None, alibi_slopes=None, dsoftmax_lse=None, dsinks!=None, softcap=0.0, *dropout,
             startend_row_indices=None) -> ()

    pack: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k; all None in a dense batch
    mask: causal, window_left, window_right, attention_chunk; -1 means no bound on that side, chunk 0 no chunks
    dropout: dropout_bits=None, rng_state=None, dropout_p=0.0, max_seqlen_q=None, max_seqlen_k=None

Tensors. In a dense batch, q and dq are (batch, seqlen_q, heads, head_dim), k and dk (batch, seqlen_k, kv_heads,
head_dim), v and dv (batch, seqlen_k, kv_heads, value_head_dim), and out and dout (batch, seqlen_q, heads,
value_head_dim). All are bf16 or all are fp16, with any strides; head dims are multiples of 8 up to 256. out is
contiguous. dq, dk and dv share no memory with each other or with a tensor that is read. softmax_lse is fp32 (batch,
heads, seqlen_q), natural logarithm. A query that sees no key has output 0, gradients 0 and log-sum-exp +inf (the
backward also accepts -inf). "order_free" requires the softmax_lse of the forward, or one merged from several forwards.
`schedule` is a policy of `dash_attn.schedule` or "auto", and `sm_margin` is the number of SMs left to other kernels.

Variable-length batches. total_q replaces (batch, seqlen_q), and total_k replaces (batch, seqlen_k); softmax_lse is
(heads, total_q). cu_seqlens_* are int32 (batch + 1,); seqused_* are None or int32 (batch,). All are contiguous and on
q's device. Sequence b starts at row cu_seqlens[b] and has seqused[b] rows, or else all rows up to cu_seqlens[b + 1].
Rows outside of all sequences are not read; they have output 0, log-sum-exp +inf and gradients 0.

Scores. softcap is at least 0, and 0 means no cap. alibi_slopes are fp32 (heads,) or (batch, heads), and exclude a
softcap. sinks are fp32 (heads,). The log-sum-exp includes them: a query that sees no key has the sink as its
log-sum-exp if the sink is above -inf. dsoftmax_lse, the gradient of the log-sum-exp, has its shape and is ignored where
the log-sum-exp is infinite. dsinks, fp32 (heads,) and contiguous, is written if it is given. Its sum over the queries
of a sequence is a tree that only the sequence's length determines; the sequences are then added in their order.
`dash_attn.reference` has the formulas.

Largest logits. max_logits, fp32 (batch, heads), has the largest score of each sequence's query heads, without sinks. It
is -inf if no query of the sequence sees a key, and NaN if a score is NaN or +inf. It has no gradient. On a GPU it
excludes dropout, a softcap and alibi_slopes.

Masks by key columns. startend_row_indices, int32 (batch, 1 or kv_heads, seqlen_k, n) or (1 or kv_heads, total_k, n)
with any strides, hides query rows of each key in addition to the mask (`dash_attn.masks` has the rule). Both passes
take the same tensor. It excludes dropout, a softcap, alibi_slopes, and schedules other than "auto" and "descending".

Dropout. dropout_p is the probability of dropping an element. If it is above 0, the caller gives either dropout_bits or
rng_state, and gives the same to both passes. dropout_bits come from `dash_attn.dropout.dropout_bits` for the query
heads and lengths of the call (in a variable-length batch, for the longest sequence). rng_state is int64 (2,) or (batch,
2); the ops make the bits from it with the default mapping and rounds, where sequence b has the number b under one
state, and 0 under a state of its own. On a GPU each pass makes the bits and keeps none: batch * heads * seqlen_q *
seqlen_k / 8 bytes. A variable-length batch with rng_state also needs max_seqlen_q and max_seqlen_k, ints that no
sequence exceeds, and has bits for so many rows; a longer sequence is a device-side error, raised before bits are read.
No other call uses them. On a GPU dropout excludes softcap and alibi_slopes.

Bits. A row of the output depends only on its query, on the keys and values that the query sees, and on their number.
Gradients also depend on the schedule. Neither depends on `sm_margin`, on the SMs of the device, or on the other
sequences of the batch. If K or V is not finite, a row may be NaN because of a key that it does not see, in a KV tile of
which the row, or under a window a neighbouring row, sees other keys (docs/forward.md).

    attention(q, k, v, softmax_scale, causal, schedule, sm_margin, window_left=-1, window_right=-1, attention_chunk=0,
              cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, sinks=None, alibi_slopes=None,
              softcap=0.0, *dropout, startend_row_indices=None) -> (out, softmax_lse)
    attention_kvpacked(q, kv, softmax_scale, ...)    attention_qkvpacked(qkv, num_heads_q, softmax_scale, ...)
    attention_and_max_logits(...)    attention_kvpacked_and_max_logits(...)    attention_qkvpacked_and_max_logits(...)

These combine both passes in one differentiable function of q, k, v and sinks, which takes the arguments of
`dash_attn.interface`; sinks may have any float dtype. attention_qkvpacked has one cu_seqlens, seqused and max_seqlen
for both sides. All of these ops are C++ (csrc/bindings/autograd.cpp). They call the kernels, `dash_attn_C::forward` and
`dash_attn_C::backward`, which take a positive scale and tensors that TMA can address. `_C` implements the kernels for
CUDA; for the CPU this module implements them with the reference.

Two more ops exist for torch alone. `flash_attn::_dash_attn_forward` is another name of `forward`, which the
differentiable ops call after `name_forward(True)`. `_gradients` is `backward` with results, for gradients that a vmap
batches.
"""

import pathlib
import warnings

import torch

from . import build_record, packs, reference
from . import schedule as _schedule
from .dropout import layout
from .tile_order import tile_order

HOPPER = (9, 0)
"""The compute capability of the GPUs that the kernels run on."""

_FOLDER = pathlib.Path(__file__).parent
# setup.py writes the reason into this file if it leaves out the kernels.
_WITHOUT_KERNELS = "without_kernels.txt"
_BUILD_AGAIN = "install dash_attn again: `pip install --no-build-isolation .` in its source"
_ASKED_FOR = "DASH_ATTN_SKIP_CUDA=1"


def why_not_loaded(stem: str, absent: str, folder: pathlib.Path = _FOLDER) -> str | None:
    """Loads the compiled library `stem`. Returns None, or why that is impossible: `absent` if there is no such file."""
    found = sorted(folder.glob(f"{stem}.*so"))
    if not found:
        return f"{absent} (no {stem}*.so in {folder})"
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        return f"dash_attn must have one {stem}*.so in {folder}, got {names}: remove the stale ones"
    # Libraries of different sources may number schedules and arguments differently.
    if problem := build_record.why_not_one_build(found[0], *sorted(folder.glob("_schedule*.so"))):
        return f"{found[0]} cannot be loaded: {problem}"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        hint = "after a change of torch, install dash_attn again: pip install --no-build-isolation ."
        return f"{found[0]} cannot be loaded: {error.__cause__ or error} ({hint})"
    return None


def _forward_cpu(
    q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, softmax_scale,
    softcap, causal, window_left, window_right, attention_chunk, sm_margin, dropout_bits=None, rng_state=None,
    dropout_p=0.0, startend_row_indices=None, max_logits=None,
):  # fmt: skip
    mask = {"causal": causal, "window": (window_left, window_right), "attention_chunk": attention_chunk}
    pack = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    of_keys = [k, v, *_with_keys_first(startend_row_indices)]
    sequences = packs.sequences(*pack, [q, out], of_keys, [softmax_lse], alibi_slopes)
    if cu_seqlens_q is not None:
        out.zero_()
        softmax_lse.fill_(torch.inf)
    kept = layout.Kept(dropout_bits, rng_state, dropout_p)
    for (q_rows, out_rows), (k_rows, v_rows, *columns), (lse,), slopes, number in sequences:
        assert lse is not None
        scores = {"softmax_scale": softmax_scale, "softcap": softcap, "alibi_slopes": slopes}
        keep = kept.of(number, q.shape[-2], q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        dropout = {"keep": keep, "dropout_p": dropout_p}
        beside = {"sinks": sinks, "startend_row_indices": columns[0].transpose(1, 2) if columns else None}
        if max_logits is not None:
            beside["max_logits"] = max_logits if number is None else max_logits[number : number + 1]
        results = reference.forward(q_rows, k_rows, v_rows, **beside, **scores, **mask, **dropout)
        for target, result in zip((out_rows, lse), results):
            target.copy_(result)


def _forward_of_cache_cpu(
    q, k, v, out, softmax_lse, cu_seqlens_q, seqused_q, block_table, seqused_k, page_rows, page_distance, sinks,
    alibi_slopes, softmax_scale, softcap, causal, window_left, window_right, attention_chunk, sm_margin,
):  # fmt: skip
    """Copies the keys of every sequence. Entries of the table past a sequence's keys are not looked at."""
    batch = len(seqused_k)
    if cu_seqlens_q is None:
        cu_seqlens_q = packs.multiples(q.shape[0] // batch, batch + 1, q.device)
    if block_table is None:
        block_table = torch.arange(batch)[:, None]
    place = torch.arange(block_table.shape[1] * page_rows).expand(batch, -1)
    row = block_table.repeat_interleave(page_rows, dim=1) * page_distance + place % page_rows
    row = row[place < seqused_k[:, None]]
    cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    _forward_cpu(
        q, k[row], v[row], out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, None, sinks, alibi_slopes,
        softmax_scale, softcap, causal, window_left, window_right, attention_chunk, sm_margin,
    )  # fmt: skip


def _append_cpu(k_cache, v_cache, k, v, ends, seqlens, cu_seqlens, block_table, sm_margin):
    batch, page_rows = len(seqlens), k_cache.shape[1]
    if cu_seqlens is None:
        if k.shape[0] % max(batch, 1):
            raise ValueError(f"the rows of k must be a multiple of the {batch} sequences, got {k.shape[0]}")
        cu_seqlens = packs.multiples(k.shape[0] // max(batch, 1), batch + 1, k.device)
    table = torch.arange(batch)[:, None] if block_table is None else block_table
    written = []
    for number, (own, length) in enumerate(
        zip(packs.rows_of_sequences("k_new", cu_seqlens, None, k.shape[0]), seqlens.tolist())
    ):
        count = own.stop - own.start
        most = table.shape[1] * page_rows - count
        ends[number] = length + count
        if block_table is not None and length == -count:
            continue
        if not 0 <= length <= most:
            raise ValueError(f"cache_seqlens must be from 0 to {most} (room in the cache), got {length}")
        places = torch.arange(length, length + count)
        pages = table[number, places // page_rows].long()
        written.append((torch.arange(own.start, own.stop), pages, places % page_rows))
    if not written:
        return
    rows, pages, places = map(torch.cat, zip(*written))
    if ((pages < 0) | (pages >= k_cache.shape[0])).any():
        raise ValueError(
            f"block_table and cache_batch_idx must be at least 0 and less than {k_cache.shape[0]} wherever a key is "
            f"written, got {pages.tolist()}"
        )
    k_cache[pages, places] = k[rows]
    v_cache[pages, places] = v[rows]


def _backward_cpu(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes,
    dsoftmax_lse, dsinks, softmax_scale, softcap, causal, window_left, window_right, attention_chunk, schedule,
    sm_margin, dropout_bits=None, rng_state=None, dropout_p=0.0, startend_row_indices=None,
):  # fmt: skip
    mask = {"causal": causal, "window": (window_left, window_right), "attention_chunk": attention_chunk}
    group_size = q.shape[-2] // k.shape[-2]
    pack = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    of_queries, of_lse = [dout, q, out, dq], [softmax_lse, dsoftmax_lse]
    of_keys = [k, v, dk, dv, *_with_keys_first(startend_row_indices)]
    sequences = packs.sequences(*pack, of_queries, of_keys, of_lse, alibi_slopes)
    if cu_seqlens_q is not None:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    if dsinks is not None:
        dsinks.zero_()
    kept = layout.Kept(dropout_bits, rng_state, dropout_p)
    for sequence in sequences:
        (dout_rows, q_rows, out_rows, dq_rows), (k_rows, v_rows, dk_rows, dv_rows, *columns), (lse, dlse) = sequence[:3]
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
        scores |= {"startend_row_indices": columns[0].transpose(1, 2) if columns else None}
        keep = kept.of(sequence.number, q.shape[-2], q_rows.shape[0], q_rows.shape[1], k_rows.shape[1])
        dropped = {"keep": keep, "dropout_p": dropout_p, "order": order}
        results = reference.backward(dout_rows, q_rows, k_rows, v_rows, out_rows, lse, **scores, **mask, **dropped)
        for gradient, result in zip((dq_rows, dk_rows, dv_rows), results):
            gradient.copy_(result)


def _with_keys_first(startend_row_indices):
    """Returns [] or the tensor with its dimensions in the order of those of k."""
    return [] if startend_row_indices is None else [startend_row_indices.transpose(-3, -2)]


def _raiser(reason):
    def without_kernels(*_):
        raise RuntimeError(reason)

    return without_kernels


def why_left_out() -> str:
    """Returns why the build left out the kernels; empty if the build noted nothing."""
    note = _FOLDER / _WITHOUT_KERNELS
    return note.read_text().strip() if note.is_file() else ""


def _load_kernels() -> str | None:
    """Returns None, or why CUDA tensors have no kernels. Warns if torch has CUDA and the user did not ask for this."""
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


def _autograd_of_torch(folder: pathlib.Path = _FOLDER) -> tuple[str, str]:
    """Returns the stem of the library for this torch and the error if it is absent. A wheel has one for each torch."""
    served = [path.stem.removeprefix("_autograd_torch") for path in folder.glob("_autograd_torch*.so")]
    if not served:
        return (
            "_autograd",
            "dash_attn was installed without its ops: `pip install --no-build-isolation .` from its root",
        )
    release = ".".join(torch.__version__.split(".")[:2])
    serves = ", ".join(sorted(served, key=lambda version: [int(part) for part in version.split(".")]))
    return (
        f"_autograd_torch{release}",
        f"this wheel of dash_attn is for torch {serves}, and this is {torch.__version__}",
    )


def _load() -> str | None:
    reason = why_not_loaded(*_autograd_of_torch())
    if reason is not None:
        raise ImportError(reason)
    torch.library.impl("dash_attn_C::forward", "CPU", _forward_cpu)
    torch.library.impl("dash_attn_C::forward_of_cache", "CPU", _forward_of_cache_cpu)
    torch.library.impl("dash_attn_C::append", "CPU", _append_cpu)
    torch.library.impl("dash_attn_C::backward", "CPU", _backward_cpu)
    reason = _load_kernels()
    for op in ("forward", "forward_of_cache", "append", "backward", "dropout_bits", "fingerprint_blocks"):
        name = f"dash_attn_C::{op}"
        # If the kernels are older than an op, the op must raise instead of using an implementation for any device.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            torch.library.impl(name, "CUDA", _raiser(reason or f"{name} is not in {_FOLDER}'s _C: {_BUILD_AGAIN}"))
    return reason


why_no_kernels = _load()
"""Why CUDA tensors raise in this process; None if the kernels are loaded."""
