"""ring-flash-attn's own functions on top of the private functions of dash_attn.compat.flash_attn_2."""

import importlib.util
import sys

import pytest
import torch
from float64_reference import attention_float64
from ring_checks import WORLD_SIZE, check_against_full_attention, run_ring
from ring_worker import CASES, import_ring

from dash_attn import flash_attn_func
from dash_attn.compat import flash_attn_2, flash_attn_3

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ring(tmp_path_factory.mktemp("ring"), "cpu")


@pytest.fixture(scope="module")
def eager_ranks(tmp_path_factory):
    return run_ring(tmp_path_factory.mktemp("eager_ring"), "cpu", "eager")


@pytest.mark.parametrize("name", CASES)
def test_against_full_attention(ranks, eager_ranks, name):
    check_against_full_attention(ranks, eager_ranks, name)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_again(ranks, name):
    assert [results[name]["differs"] for results in ranks] == [[]] * WORLD_SIZE


@pytest.fixture
def merge():
    """ring-flash-attn's merge of parts; what is imported for it is forgotten again."""
    before = set(sys.modules)
    yield import_ring("utils").update_out_and_lse
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("flash_attn", "ring_flash_attn"):
            del sys.modules[name]


def parts_of_keys():
    """Queries, and two parts of their keys: the first 14 queries see none of the second part under the causal mask."""
    generator = torch.Generator().manual_seed(0)
    q, *kv = (torch.randn(1, n, 2, 16, generator=generator).bfloat16() for n in (24, 24, 24, 10, 10))
    return q, kv[:2], kv[2:]


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3], ids=["flash_attn_2", "flash_attn_3"])
def test_merge_of_queries_that_see_no_key_of_a_part(merge, module):
    q, first, second = parts_of_keys()

    def part(keys, causal):
        if module is flash_attn_2:
            return module._flash_attn_forward(q, *keys, 0.0, 16**-0.5, causal, -1, -1, 0.0, None, False)[:2]
        return module._flash_attn_forward(q, *keys, softmax_scale=16**-0.5, causal=causal)[:2]

    (out, lse), (out_2, lse_2) = part(first, False), part(second, True)
    assert (lse_2[:, :, :14] == -torch.inf).all() and lse_2[:, :, 14:].isfinite().all()
    merged, merged_lse = merge(*merge(None, None, out, lse), out_2, lse_2)
    merged_lse = merged_lse.squeeze(-1).transpose(1, 2)
    assert torch.equal(merged[:, :14], out[:, :14].float()) and torch.equal(merged_lse[:, :, :14], lse[:, :, :14])

    exact, exact_2 = attention_float64(q, *first), attention_float64(q, *second, causal=True)
    no_key = exact_2.softmax_lse == torch.inf
    expected_lse = torch.logaddexp(exact.softmax_lse, exact_2.softmax_lse.masked_fill(no_key, -torch.inf))
    torch.testing.assert_close(merged_lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    weights = [(x - expected_lse).exp().transpose(1, 2)[..., None] for x in (exact.softmax_lse, exact_2.softmax_lse)]
    weights[1] = weights[1].masked_fill(no_key.transpose(1, 2)[..., None], 0.0)
    expected = weights[0] * exact.out + weights[1] * exact_2.out
    rounding = weights[0] * exact.out.abs() + weights[1] * exact_2.out.abs()
    assert ((merged.double() - expected).abs() <= 2.0**-7 * rounding + 2.0**-9 * expected.abs().amax()).all()


def test_the_public_functions_infinity_would_win_the_merge(merge):
    """Why the private functions have the other sign."""
    q, first, second = parts_of_keys()
    out, lse, _ = flash_attn_func(q, *first, return_attn_probs=True)
    merged, merged_lse = merge(
        *merge(None, None, out, lse), *flash_attn_func(q, *second, causal=True, return_attn_probs=True)[:2]
    )
    assert not merged[:, :14].any() and (merged_lse[:, :14] == torch.inf).all()
