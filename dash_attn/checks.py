"""Checks that the ops cannot make well: of arguments that are not tensors, and of values that other libraries accept.

Shapes, dtypes and devices are checked by the ops (csrc/bindings/operand_checks.h). Every message names the argument,
what it must be and what it was. A wrong type raises TypeError, a wrong value or shape raises ValueError, and a value
that other libraries accept but dash_attn does not support raises NotImplementedError.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .schedule import POLICIES

SCHEDULES = ("auto", *POLICIES)
QV, FP8 = "a second query-value product is not supported", "fp8 is not supported"
DROPOUT = "this function has no dropout; dash_attn.flash_attn_func has it"
# Whether lengths and indices on a GPU are read and checked before a launch. The check waits for the GPU.
CHECKS_VALUES = os.environ.get("DASH_ATTN_CHECK") == "1"
_MAX_INT = 2**31 - 1
_MAX_SMS = 144  # SMs of a full GH100, from which every Hopper GPU is made


def check_tensors(named: Mapping[str, object]) -> None:
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {describe(tensor)}")
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "a nested tensor" if tensor.is_nested else tensor.layout
            raise TypeError(f"{name} must be a dense tensor (torch.strided), got {layout}")


def reads_values(x: torch.Tensor) -> bool:
    """Returns whether the values of `x` are read on the host: always on a CPU, and on a GPU with DASH_ATTN_CHECK=1.

    Fake tensors, and tensors that a compiler traces or torch.func wraps, have no values to read.
    """
    reads = x.device.type == "cpu" or (CHECKS_VALUES and x.device.type == "cuda")
    if not reads or torch.compiler.is_compiling():
        return False
    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_values(holds: torch.Tensor, message: str) -> None:
    """Raises ValueError if `holds` is false and values are read; otherwise asserts on the device, without waiting."""
    if reads_values(holds):
        if not holds:
            raise ValueError(message)
    else:
        torch._assert_async(holds, message)


def check_written(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
    """Checks that every written element has its own memory location, which no other tensor of the call uses.

    The check detects shared memory if one tensor starts inside another that is dense, or if both start at one address.
    """
    # Tensors of a compiler have no address, and their strides may be symbols.
    compiling = torch.compiler.is_compiling()
    for name, x in written.items():
        expanded = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))
        if expanded or (not compiling and _overlaps_itself(x)):
            raise ValueError(f"{name} must have one memory location per element, got strides {x.stride()}")
    if compiling:
        return
    tensors = {**read, **written}
    storages = {name: x.untyped_storage()._cdata for name, x in tensors.items()}
    for name, x in written.items():
        for other_name, other in tensors.items():
            if other_name != name and storages[name] == storages[other_name] and _share_memory(x, other):
                raise ValueError(f"{name} must not share memory with {other_name}")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Returns whether a step along a dimension stays within the reach of the dimensions with smaller strides."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def _share_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one storage overlap."""
    if x.numel() == 0 or other.numel() == 0:
        return False
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in (x, other)]
    for tensor, start, other_start in ((x, starts[0], starts[1]), (other, starts[1], starts[0])):
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        # A tensor with gaps certainly uses only its first element.
        if start <= other_start < start + (tensor.nbytes if span == tensor.numel() else 1):
            return True
    return False


def reject_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa) -> None:
    """Raises NotImplementedError for the first argument that requests an unsupported feature."""
    reject_given(QV, qv=qv)
    reject_given(FP8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_hints(num_splits, pack_gqa)


def reject_dropout(dropout_p: object, why: str = DROPOUT) -> None:
    """Raises NotImplementedError unless dropout_p is 0, for functions without dropout."""
    _require(_is_zero(dropout_p), "dropout_p", "0.0", why, dropout_p)


def reject_given(why: str, **named: object) -> None:
    """Raises NotImplementedError for the first argument that is not None."""
    for name, value in named.items():
        _require(value is None, name, "None", why, value)


def reject_flag(name: str, value: object, why: str) -> None:
    """Raises NotImplementedError for a flag that is set."""
    _require(not as_flag(name, value), name, "False", why, value)


def check_hints(num_splits: object, pack_gqa: object) -> None:
    """Checks the types of FlashAttention-3's tuning hints, which are otherwise ignored."""
    as_int("num_splits", num_splits, "an int (it is ignored)")
    if pack_gqa is not None and _as_flag(pack_gqa) is None:
        raise TypeError(f"pack_gqa must be None or a bool (it is ignored), got {describe(pack_gqa)}")


def as_window(window_size: object) -> tuple[int, int]:
    """Returns (left, right) as the ops expect it, from any sequence of two elements; None becomes -1."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        # The usual case: every call of a model with windows takes this path.
        if type(left) is int and type(right) is int and -1 <= left <= _MAX_INT and -1 <= right <= _MAX_INT:
            return window_size
    sides = _elements(window_size)
    if sides is None or len(sides) != 2 or not all(side is None or _is_integer(side) for side in sides):
        error = ValueError if sides and len(sides) != 2 else TypeError
        raise error(
            "window_size must be (left, right), each an int or None, got "
            f"{describe(window_size if sides is None else sides)}"
        )
    left, right = (-1 if side is None else max(-1, min(side, _MAX_INT)) for side in sides)
    return left, right


def _elements(sequence: object) -> list[Any] | tuple[Any, ...] | None:
    """Returns the elements of a list, a tuple, another sequence, an array or a tensor; None for any other object.

    Elements that are arrays or tensors become numbers. Reading a tensor on a GPU waits for the GPU.
    """
    if isinstance(sequence, Sequence) and not isinstance(sequence, (str, bytes)):
        plain = [side if side is None or _is_integer(side) else _as_plain(side) for side in sequence]
        return plain if isinstance(sequence, list) else tuple(plain)
    plain = _as_plain(sequence)
    return plain if isinstance(plain, list) and getattr(sequence, "ndim", None) == 1 else None


def _as_plain(value: Any) -> Any:
    """Converts an array or a tensor that has values to Python numbers. numpy is not a dependency."""
    has_values = hasattr(value, "tolist") and not getattr(value, "is_meta", False)
    return value.tolist() if has_values else value


def as_attention_chunk(attention_chunk: object) -> int:
    """Returns an int of at least 0. None becomes 0, which means no chunks."""
    if attention_chunk is None or (type(attention_chunk) is int and attention_chunk == 0):
        return 0
    if not _is_integer(attention_chunk):
        raise TypeError(f"attention_chunk must be an int or None, got {describe(attention_chunk)}")
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk must be at least 0, got {describe(attention_chunk)}")
    return min(attention_chunk, _MAX_INT)


def check_max_seqlen(name: str, value: object) -> None:
    """Checks the type of a hint. Its value is not checked: a tensor would have to be read back from its device."""
    # A compiler would guard on the number, which is impossible if the number comes from a tensor.
    if type(value) is int and (torch.compiler.is_compiling() or value >= 0):
        return
    if isinstance(value, torch.Tensor):
        is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        good = is_integer and value.dim() == 0
    else:
        good = _is_integer(value) and (isinstance(value, torch.SymInt) or value >= 0)
    if not good:
        error = ValueError if _is_integer(value) else TypeError
        raise error(f"{name} must be an int of at least 0 or an integer tensor of shape (), got {describe(value)}")


def as_int(name: str, value: object, allowed: str) -> int:
    """Returns an int, or a torch.SymInt unchanged."""
    if not _is_integer(value):
        raise TypeError(f"{name} must be {allowed}, got {describe(value)}")
    # operator.index would turn a symbol of a compiler into a constant.
    return value if type(value) is int or isinstance(value, torch.SymInt) else operator.index(value)


def as_flag(name: str, value: object) -> bool:
    flag = _as_flag(value)
    if flag is None:
        raise TypeError(f"{name} must be a bool, got {describe(value)}")
    return flag


def as_number(name: str, number: object):
    """Returns a float, or a torch.SymFloat unchanged. The ops check the value."""
    if isinstance(number, torch.SymFloat):
        return number
    # A tensor would have to be read back from its device.
    if not is_number(number):
        raise TypeError(f"{name} must be a finite number or None, got {describe(number)}")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} * log2(e) must be finite in fp32, got {name}={describe(number)}") from None


def as_scores(softcap: object, alibi_slopes: object, learnable_sink: object, s_aux: object) -> dict[str, object]:
    """Returns the ops' keyword arguments for scores."""
    if learnable_sink is not None and s_aux is not None:
        raise ValueError("learnable_sink and s_aux are two names of one argument, got both: one must be None")
    tensors = {"alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink, "s_aux": s_aux}
    check_tensors({name: x for name, x in tensors.items() if x is not None})
    sinks = s_aux if learnable_sink is None else learnable_sink
    return {"softcap": as_softcap(softcap), "alibi_slopes": alibi_slopes, "sinks": sinks}


def as_softcap(softcap: object):
    """Returns a finite number above 0, or 0.0 for no cap: for None and, as in FlashAttention-2, for 0 or less."""
    number = 0.0 if softcap is None else as_number("softcap", softcap)
    if number <= 0:
        return 0.0
    if not number < math.inf:
        raise ValueError(f"softcap must be a finite number or None (0 or less disables it), got {number}")
    return number


def as_sm_margin(sm_margin: object):
    """Returns an int, or a torch.SymInt unchanged. The ops check it against the SMs of the GPU."""
    if isinstance(sm_margin, torch.SymInt):
        return sm_margin
    number = as_int("sm_margin", sm_margin, "an int")
    if not 0 <= number < _MAX_SMS:
        raise ValueError(
            f"sm_margin must be at least 0 and less than the SMs of the GPU (at most {_MAX_SMS} on Hopper), got "
            f"{describe(sm_margin)}"
        )
    return number


def as_num_heads_q(num_heads_q: object):
    """Returns an int, a torch.SymInt or None."""
    return None if num_heads_q is None else as_int("num_heads_q", num_heads_q, "an int or None")


def check_schedule(schedule: object) -> None:
    """Checks that `schedule` names a schedule. The ops check whether the call supports it."""
    if not isinstance(schedule, str):
        raise ValueError(f"schedule must be 'auto' or the name of a policy, got {describe(schedule)}")
    if schedule not in SCHEDULES:
        similar = difflib.get_close_matches(schedule, SCHEDULES, n=1, cutoff=0.75)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {describe(schedule)}{hint}")


def _require(holds: bool, name: str, allowed: str, why: str, value: object) -> None:
    if not holds:
        raise NotImplementedError(f"{name} must be {allowed} ({why}), got {describe(value)}")


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def _is_zero(value: object) -> bool:
    return value is None or (isinstance(value, numbers.Real) and value == 0)


def _as_flag(value: object) -> bool | None:
    """Returns the bool that a bool, a numpy bool, 0 or 1 stands for; None for any other object."""
    if isinstance(value, numbers.Integral):
        return bool(value) if value in (0, 1) else None
    # numpy's bool is not an Integral, and numpy is not a dependency.
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if is_numpys else None


def describe(value: Any) -> str:
    """Describes a value in a few words: an array or a tensor by its shape, not its elements."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(hasattr(item, "shape") for item in value):
        return f"a {kind} of {len(value)}, the first of them {describe(value[0])}"
    if getattr(value, "shape", ()):
        return f"{type(value).__module__}.{kind} of shape {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    if len(text) > 80:
        return f"{text[:80]}... ({kind})"
    return text if isinstance(value, (int, float, str, tuple, list)) else f"{text} ({kind})"
