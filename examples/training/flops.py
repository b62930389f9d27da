"""Floating-point operations of a step, by the convention of "model FLOPs" (PaLM, arXiv 2204.02311, appendix B).

Operations of the model's own products are counted, once: those of a forward, and twice as many of its backward. What is
computed again (scores, in the backward of attention) is not, nor are norms, softmax, the lookup of embeddings and the
optimizer. Under the causal mask half of the scores are counted. The share of the peak that they reach is the
utilisation, MFU; peak is the dense bf16 rate in the vendor's data sheet, 989 TFLOP/s for the H100 and H200 SXM.
"""

from __future__ import annotations

from .text import VOCABULARY

PEAK_TFLOPS = 989.0
CONVENTION = "6 a weight of a product and token, 6 L T H d a token for causal attention, nothing computed again"


def linear_weights(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> int:
    """Weights that tokens are multiplied with: all but those of the norms and of the embedding."""
    head_dim = width // heads
    of_attention = width * head_dim * (2 * heads + 2 * kv_heads)
    return layers * (of_attention + 3 * width * hidden) + width * VOCABULARY


def attention_forward(sequences: float, seqlen: int, heads: int, head_dim: int) -> float:
    """Of one layer: two products, half of each under the causal mask. A backward has five, of which four are counted
    as the model's."""
    return 2 * sequences * seqlen**2 * heads * head_dim


def of_a_step(config: dict) -> tuple[float, float]:
    """(linear layers, attention), forward and backward, of all ranks together."""
    shape = {name: config[name] for name in ("layers", "width", "heads", "kv_heads", "hidden")}
    tokens = config["sequences"] * config["seqlen"]
    head_dim = config["width"] // config["heads"]
    attention = attention_forward(config["sequences"], config["seqlen"], config["heads"], head_dim)
    return 6.0 * linear_weights(**shape) * tokens, 3.0 * config["layers"] * attention
