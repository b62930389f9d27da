"""The masks of FlashAttention-2 as torch's build of it has them: `mapping="flash_attention_2"` makes the same bits of
the seed and offset that it reports, and gradients with them agree."""

import gpu_support as support
import pytest
import torch
from float64_reference import Dropout, Scores, attention_float64, relative_error, visible_keys

import dash_attn
from dash_attn.dropout import DropoutState, dropout_bits


def flash_attention_2(q, k, v, p: float, causal: bool):
    """out, softmax_lse, S_dmask, the seed and offset as an int64 tensor (2,), and torch's gradients for a dout; a skip
    where this torch has none. Tensors are (batch, heads, seqlen, head_dim)."""
    aten = torch.ops.aten
    try:
        found = aten._scaled_dot_product_flash_attention(q, k, v, p, causal, True)
    except RuntimeError as error:
        if "USE_FLASH_ATTENTION was not enabled for build" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} was built without FlashAttention-2")
    out, lse, cu_q, cu_k, max_q, max_k, rng_state, unused, debug = found
    if debug.numel() == 0:
        pytest.skip(f"torch {torch.__version__} was built without FlashAttention-2's debug mask")
    if rng_state.numel() == 2:  # seed and offset in one; older versions have a tensor for each
        state = rng_state.view(torch.int64)
    else:
        state = torch.stack([rng_state.reshape(()).long(), unused.reshape(()).long()])

    def gradients(dout):
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, rng_state, unused
        )

    return out, debug, state.to(q.device), gradients


def tensors_of(shape: tuple[int, ...], device: str) -> list[torch.Tensor]:
    """q, k, v and dout, (batch, seqlen, heads, head_dim)."""
    batch, seqlen_q, seqlen_k, heads, head_dim = shape
    problem = support.Problem(batch, seqlen_q, seqlen_k, heads, heads, head_dim, False)
    return list(support.random_qkv_dout(problem, device, seed=3))


# torch's causal mask starts at the first key, so its lengths are equal here.
@pytest.mark.parametrize("shape, causal", [
    ((2, 300, 300, 3, 64), False), ((2, 300, 300, 3, 64), True), ((3, 130, 517, 2, 128), False),
    ((1, 513, 513, 2, 128), True), ((1, 64, 64, 5, 96), False), ((1, 257, 99, 2, 256), False),
])  # fmt: skip
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_flash_attention_2_has_the_masks_of_its_mapping(p, shape, causal, device):
    q, k, v, _ = (x.transpose(1, 2) for x in tensors_of(shape, device))
    torch.manual_seed(5)
    torch.rand(1000, device=device)  # an offset
    _, debug, state, _ = flash_attention_2(q, k, v, p, causal)
    batch, seqlen_q, seqlen_k, heads, _ = shape
    sizes = dict(batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    kept = dropout_bits(DropoutState(state), p=p, mapping="flash_attention_2", **sizes).mask()
    found = ~debug[:, :, :seqlen_q, :seqlen_k].signbit()
    seen = visible_keys(seqlen_q, seqlen_k, causal, q.device)
    differ = (found != kept) & seen
    assert not bool(differ.any()), f"{int(differ.sum())} of {differ.numel()} elements"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_sdpa_are_ours_with_its_bits(head_dim, causal, device):
    """Each within what bf16 explains of float64 with the mask; another mask is off by the norm itself."""
    shape = (2, 320, 320, 4, head_dim)
    q, k, v, dout = tensors_of(shape, device)
    out, _, state, gradients = flash_attention_2(*(x.transpose(1, 2) for x in (q, k, v)), 0.1, causal)
    theirs = dict(zip(("out", *support.GRADIENTS), (out, *gradients(dout.transpose(1, 2)))))
    sizes = dict(batch=2, heads=4, seqlen_q=320, seqlen_k=320)
    bits = dropout_bits(DropoutState(state), p=0.1, mapping="flash_attention_2", **sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    own = dash_attn.flash_attn_func(*leaves, dropout_p=0.1, dropout_bits=bits, causal=causal)
    ours = dict(zip(("out", *support.GRADIENTS), (own.detach(), *torch.autograd.grad(own, leaves, dout))))
    scores = Scores(dropout=Dropout(0.1, bits.mask()))
    exact = attention_float64(*(x.detach() for x in leaves), dout, causal=causal, scores=scores)
    for name in ours:
        truth = getattr(exact, name)
        for who, x in (("ours", ours[name]), ("torch's", theirs[name].transpose(1, 2))):
            error = relative_error(x, truth)
            assert error < 2.0**-7, f"{who} {name}: relative error {error:.2e}"
