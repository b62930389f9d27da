"""Receipts of training runs: fingerprints by which two runs are compared, and by which the place where they part is
found. docs/receipts.md explains them; `python -m dash_attn.receipts compare A B` compares."""

from .comparison import Comparison, Difference, compare
from .fingerprints import DEFAULT_BLOCK, FINGERPRINT, block_sums, fingerprint
from .recorder import KINDS, Recorder, tap
from .shards import Shard

__all__ = [
    "DEFAULT_BLOCK", "FINGERPRINT", "KINDS", "Comparison", "Difference", "Recorder", "Shard", "block_sums", "compare",
    "fingerprint", "tap",
]  # fmt: skip
