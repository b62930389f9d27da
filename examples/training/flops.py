"""Floating-point operations of a step, by the convention of "model FLOPs" (PaLM, arXiv 2204.02311, appendix B).

The convention counts the operations of the model's own products once: those of a forward, and twice as many for its
backward. Recomputation (scores, in the backward of attention), norms, softmax, the embedding lookup and the optimizer
do not count. Under the causal mask half of the scores count. MFU, the utilization, is their share of the peak, the
dense bf16 rate in the vendor's data sheet: 989 TFLOP/s for the H100 and H200 SXM.
"""

from __future__ import annotations

from .text import VOCABULARY

PEAK_TFLOPS = 989.0
CONVENTION = "6 per weight of a product and token, 6 L T H d per token for causal attention, no recomputation"


def linear_weights(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> int:
    """Returns the number of weights that multiply tokens: all but those of the norms and of the embedding."""
    head_dim = width // heads
    of_attention = width * head_dim * (2 * heads + 2 * kv_heads)
    return layers * (of_attention + 3 * width * hidden) + width * VOCABULARY


def attention_forward(sequences: float, seqlen: int, heads: int, head_dim: int) -> float:
    """Returns the operations of one layer: two products, half of each under the causal mask. A backward has five
    products, of which four count as the model's."""
    return 2 * sequences * seqlen**2 * heads * head_dim


def of_a_step(config: dict) -> tuple[float, float]:
    """Returns the operations of (linear layers, attention), forward and backward, over all ranks."""
    shape = {name: config[name] for name in ("layers", "width", "heads", "kv_heads", "hidden")}
    tokens = config["sequences"] * config["seqlen"]
    head_dim = config["width"] // config["heads"]
    attention = attention_forward(config["sequences"], config["seqlen"], config["heads"], head_dim)
    return 6.0 * linear_weights(**shape) * tokens, 3.0 * config["layers"] * attention
