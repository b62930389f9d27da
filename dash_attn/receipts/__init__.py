"""Receipts of training runs: fingerprints that compare two runs and locate their first difference.

docs/receipts.md explains receipts. `python -m dash_attn.receipts compare A B` compares the receipts of two runs.
"""

from .comparison import Comparison, Difference, compare
from .fingerprints import DEFAULT_BLOCK, FINGERPRINT, block_sums, fingerprint
from .recorder import KINDS, Recorder, tap
from .shards import Shard

__all__ = [
    "DEFAULT_BLOCK", "FINGERPRINT", "KINDS", "Comparison", "Difference", "Recorder", "Shard", "block_sums", "compare",
    "fingerprint", "tap",
]  # fmt: skip
