"""The types of the public functions. What a function returns depends on a flag, which the overloads tell apart.

Overloads share keywords through a TypedDict. Python's types have no way to share parameters that callers may also pass
by position, so each overload repeats those.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from .dropout import DropoutBits
from .schedule import Schedule as Schedule

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip
__version__: str
__bits_version__: int

_Window: TypeAlias = Sequence[int | None]
_WithLse: TypeAlias = tuple[Tensor, Tensor, Tensor]

class _Sinks(TypedDict, total=False):
    learnable_sink: Tensor | None
    s_aux: Tensor | None

class _Keywords(_Sinks, total=False):
    """Keywords of every function that has gradients."""

    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    attention_chunk: int
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    schedule: Schedule
    dropout_bits: DropoutBits | None
    startend_row_indices: Tensor | None

class _OfQkv(_Keywords, total=False):
    num_heads_q: int | None

class _OfPack(_Keywords, total=False):
    seqused_q: Tensor | None
    seqused_k: Tensor | None

class _OfQkvPack(_OfQkv, total=False):
    seqused: Tensor | None

@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_Keywords],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **keywords: Unpack[_Keywords],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_max_logits: bool, **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_Keywords],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **keywords: Unpack[_Keywords],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_max_logits: bool, **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_OfQkv],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_OfQkv],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **keywords: Unpack[_OfQkv],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_max_logits: bool, **keywords: Unpack[_OfQkv],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, **keywords: Unpack[_OfPack],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], block_table: Tensor | None = None, **keywords: Unpack[_OfPack],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, **keywords: Unpack[_OfPack],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
    *, return_max_logits: bool, **keywords: Unpack[_OfPack],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_OfPack],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_OfPack],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **keywords: Unpack[_OfPack],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_max_logits: bool, **keywords: Unpack[_OfPack],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_OfQkvPack],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_OfQkvPack],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **keywords: Unpack[_OfQkvPack],
) -> Tensor | _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_max_logits: bool, **keywords: Unpack[_OfQkvPack],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: Literal[False] = False, **keywords: Unpack[_Sinks],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    *, return_softmax_lse: Literal[True], **keywords: Unpack[_Sinks],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, **keywords: Unpack[_Sinks],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
