"""Products of features in packs of wide heads, on CPU tensors: scores x window x pack x grouped heads x head dims.

Each sequence of a pack has the bits that it has alone, and what it has is as near to float64 as eager PyTorch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import public
from pack_support import Pack
from score_support import assert_as_alone, draw, failures, packed, sequence_of

HEAD_DIMS = [(256, 256), (192, 128), (256, 256), (192, 192), (96, 96), (80, 256)]
SCORES = [{"softcap": 20.0}, {"softcap": 1.5}, {"alibi": "heads"}, {"alibi": "batch"}, {}]


@st.composite
def products(draw_one):
    # Long enough that most queries see some keys, and that a norm is not one row's.
    length = st.one_of(st.integers(60, 100), st.integers(60, 200))
    used = draw_one(st.lists(st.tuples(length, length), min_size=1, max_size=3))
    holes = [(draw_one(st.integers(0, 9)), draw_one(st.integers(0, 9))) for _ in used]
    kv_heads, group = draw_one(st.sampled_from([(1, 1), (1, 4), (2, 2), (1, 3)]))
    side = st.one_of(st.just(-1), st.integers(16, 60))
    chunk = st.one_of(st.just(0), st.just(0), st.integers(30, 90))
    mask = dict(causal=draw_one(st.booleans()), window=draw_one(st.tuples(side, side)), attention_chunk=draw_one(chunk))
    head_dim, value_head_dim = draw_one(st.sampled_from(HEAD_DIMS))
    pack = dict(
        lengths=[(q + a, k + b) for (q, k), (a, b) in zip(used, holes)],
        used=draw_one(st.sampled_from([used, used, None])),
        first=draw_one(st.integers(0, 5)), tail=draw_one(st.integers(0, 20)),
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_head_dim,
        dtype=draw_one(st.sampled_from([torch.bfloat16, torch.float16])), seed=draw_one(st.integers(0, 99)),
    )  # fmt: skip
    scores = draw_one(st.sampled_from(SCORES))
    others = ("spt",) if scores or max(head_dim, value_head_dim) > 128 else ("spt", "order_free")
    kind = scores | {"sinks": draw_one(st.sampled_from([None, torch.float32]))}
    return pack, mask, kind, draw_one(st.booleans()), draw_one(st.sampled_from(["auto", *others]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(products())
def test_products_of_features(product):
    arguments, mask, kind, lse_gradient, schedule = product
    pack = Pack.of(**arguments)
    scores = draw(len(pack.sequences()), arguments["heads"], 1, seed=arguments["seed"], **kind)
    if lse_gradient:
        generator = torch.Generator().manual_seed(arguments["seed"])
        dlse = torch.randn(arguments["heads"], pack.q.shape[0], generator=generator)
        scores = scores._replace(dsoftmax_lse=dlse.masked_fill(pack.outside()[0], torch.nan))
    found = packed(pack, scores, schedule=schedule, **public(mask))
    alone = assert_as_alone(pack, scores, found, schedule=schedule, **public(mask))
    for number, own in enumerate(alone):
        assert failures(own, *sequence_of(pack, scores, number), **mask) == []
