"""Inputs that are harder for fixed point than normal ones; each function changes normal q, k, v, dout in place.

Tensors are (..., seqlen, heads, head_dim), drawn on the CPU so that every device sees the same values.
"""

import torch


def _normal_like(x, generator, last=None):
    shape = x.shape if last is None else (*x.shape[:-1], last)
    return torch.randn(shape, generator=generator).to(x.device)


def normal(q, k, v, dout, generator):
    pass


def sharp_softmax(q, k, v, dout, generator):
    q.mul_(10)


def one_key_takes_all(q, k, v, dout, generator):
    q.mul_(100)


def value_row(q, k, v, dout, generator):
    v[..., 7, :, :].mul_(8)


def value_channel(q, k, v, dout, generator):
    v[..., 5].mul_(50)


def key_row(q, k, v, dout, generator):
    k[..., 7, :, :].mul_(8)


def key_channel(q, k, v, dout, generator):
    k[..., 5].mul_(8)


def values_with_a_common_mean(q, k, v, dout, generator):
    v.add_(4)


def keys_with_a_common_mean(q, k, v, dout, generator):
    k.add_(4)


def heavy_tailed_rows_of_dout(q, k, v, dout, generator):
    dout.mul_(torch.exp(4 * _normal_like(dout, generator, last=1)).clamp_(max=4e3))


def heavy_tailed_elements_of_dout(q, k, v, dout, generator):
    dout.div_(_normal_like(dout, generator).abs().add_(1e-3))


def attention_sink(q, k, v, dout, generator):
    """Every query scores high on the first key, whose value is small."""
    q[..., 0] = 8
    k[..., 0] = 0
    k[..., 0, :, :] = 0
    k[..., 0, :, 0] = 6
    v[..., 0, :, :].mul_(0.05)


def small_gradients(q, k, v, dout, generator):
    dout.mul_(1e-12)


def rows_without_gradient(q, k, v, dout, generator):
    dout[..., ::3, :, :] = 0


def _attend_to_keys_of_own_kind(q, k, is_second):
    """Position j is of one of two kinds, is_second[j]; each query scores higher on all keys of its own kind."""
    kind = torch.where(is_second, -1.0, 1.0).to(q.device)[:, None]
    q[..., 0] = 24 * kind[: q.shape[-3]]
    k[..., 0] = 6 * kind[: k.shape[-3]]


def _halves(x):
    return torch.arange(x.shape[-3]) >= x.shape[-3] // 2


def documents_of_like_size(q, k, v, dout, generator):
    second = _halves(v)
    _attend_to_keys_of_own_kind(q, k, second)
    v[..., second, :, :] *= 0.2


# There is room for these where the sequence is not long.
ROOMY = (
    normal, sharp_softmax, one_key_takes_all, value_row, value_channel, key_row, key_channel, values_with_a_common_mean,
    keys_with_a_common_mean, heavy_tailed_rows_of_dout, heavy_tailed_elements_of_dout, attention_sink, small_gradients,
    rows_without_gradient, documents_of_like_size,
)  # fmt: skip


def huge_value_row(q, k, v, dout, generator):
    v[..., 7, :, :].mul_(1e4)


def huge_value_row_that_nobody_attends_to(q, k, v, dout, generator):
    v[..., 7, :, :].mul_(1e4)
    q[..., 0] = 10
    k[..., 7, :, 0] = -60


def huge_key_channel(q, k, v, dout, generator):
    k[..., 5].mul_(1e3)
    q[..., 5].mul_(1e-3)


def huge_scores(q, k, v, dout, generator):
    q.mul_(100)
    k.mul_(100)


def values_nearly_equal(q, k, v, dout, generator):
    v.add_(1e3)


def document_of_small_values(q, k, v, dout, generator, scale=1e-4):
    second = _halves(v)
    _attend_to_keys_of_own_kind(q, k, second)
    v[..., second, :, :] *= scale


def document_of_small_keys(q, k, v, dout, generator):
    second = _halves(v)
    k[..., second, :, :] *= 1e-4
    _attend_to_keys_of_own_kind(q, k, second)


def short_documents_of_small_values(q, k, v, dout, generator):
    """Runs of 24 keys, every other one small; a query attends to all runs of its own kind."""
    second = torch.arange(v.shape[-3]) // 24 % 2 == 1
    _attend_to_keys_of_own_kind(q, k, second)
    v[..., second, :, :] *= 1e-4


def values_growing(q, k, v, dout, generator):
    v.mul_(torch.logspace(-5, 0, v.shape[-3], device=v.device)[:, None, None])


# Too little room: the ordered sum.
CRAMPED = (
    huge_value_row, huge_value_row_that_nobody_attends_to, huge_key_channel, huge_scores, values_nearly_equal,
    document_of_small_values, document_of_small_keys, short_documents_of_small_values, values_growing,
)  # fmt: skip
