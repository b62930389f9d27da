"""A plug-in of SGLang for sglang_program.py: saves what attention gets and returns, a file for each call."""

import os

import torch

FOLDER = "DASH_ATTN_TEST_RECORDS"


def register():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from dash_attn.integrations import sglang

    create = ATTENTION_BACKENDS[sglang.register()]

    def create_recorded(runner):
        backend = create(runner)
        forward, count = backend.forward_extend, 0

        def recorded(q, k, v, layer, forward_batch, *args, **kwargs):
            nonlocal count
            out, batch = forward(q, k, v, layer, forward_batch, *args, **kwargs), backend.forward_metadata
            heads = [x.reshape(len(q), -1, layer.head_dim).clone() for x in (q, k, v, out)]
            call = {
                "layer": layer.layer_id, "requests": list(forward_batch.rids), "cu_seqlens": batch.cu_seqlens_q.clone(),
                "positions": forward_batch.positions.clone(), "q, k, v, out": heads,
            }  # fmt: skip
            torch.save(call, f"{os.environ[FOLDER]}/{count:05d}.pt")
            count += 1
            return out

        backend.forward_extend = recorded
        return backend

    ATTENTION_BACKENDS[sglang.NAME] = create_recorded
