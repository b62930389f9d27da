"""The policy of schedule="auto". Written by `python -m benchmarks.auto_table` from measurements of an H200 and the model
fitted to others, in benchmarks/results; docs/model.md. A change changes the bits that "auto" gives.
"""

# Keys of a sequence; a length between two takes the next one, a longer one the last.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Query heads that share a KV head, taken likewise.
QUERIES_PER_KV = (1, 4, 8)
# [padded head_dim, causal, queries_per_kv]: for each length.
FASTEST = {
    (64, False, 1): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (64, False, 4): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (64, False, 8): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (64, True, 1): ("spt_descending", "descending", "descending", "spt_descending", "spt_descending", "spt_descending"),
    (64, True, 4): ("descending", "descending", "spt_descending", "descending", "descending", "descending"),
    (64, True, 8): ("spt_descending", "descending", "spt_descending", "descending", "spt_descending", "descending"),
    (128, False, 1): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (128, False, 4): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (128, False, 8): ("descending", "descending", "descending", "descending", "descending", "descending"),
    (128, True, 1): ("spt_descending", "spt_descending", "spt_descending", "descending", "descending", "descending"),
    (128, True, 4): ("spt_descending", "descending", "spt_descending", "descending", "descending", "descending"),
    (128, True, 8): ("descending", "spt_descending", "spt_descending", "spt_descending", "descending", "descending"),
}
