"""Runs vLLM's engine on a CPU with dash_attn as its attention backend, and prints what test_vllm_engine.py compares.

A process of its own, because vLLM reads the environment at its import and changes torch's settings.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from dash_attn import flash_attn_varlen_func
from dash_attn.integrations.vllm import register
from dash_attn.integrations.vllm_backend import DashAttentionBackend, DashAttentionImpl

NEW = 12
WINDOWS = {"llama": None, "mistral": 24}
calls = []


def recorded(forward):
    def call(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        result = forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata is not None:
            # vLLM uses the tensors of a batch again.
            of_batch = {
                name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in vars(attn_metadata).items()
            }
            calls.append((type(attn_metadata)(**of_batch), *(x.clone() for x in (query, key, value, output))))
        return result

    return call


def save_model(folder, name):
    torch.manual_seed(0)
    config = {"llama": LlamaConfig, "mistral": MistralConfig}[name](
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2, pad_token_id=None,
        **({} if WINDOWS[name] is None else {"sliding_window": WINDOWS[name]}),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def generate(llm, prompts):
    parameters = SamplingParams(max_tokens=NEW, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": x} for x in prompts], parameters, use_tqdm=False)
    return [
        {
            "tokens": list(x.outputs[0].token_ids),
            "log_probabilities": [next(iter(y.values())).logprob.hex() for y in x.outputs[0].logprobs],
            "shared": x.num_cached_tokens,
        }
        for x in outputs
    ]


def prefilled(llm, sequences):
    """The log-probabilities of the last NEW tokens of each sequence when all sequences are computed as one pack."""
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    calls.clear()
    outputs = llm.generate([{"prompt_token_ids": x} for x in sequences], parameters, use_tqdm=False)
    return [[y[token].logprob.hex() for token, y in zip(x[-NEW:], z.prompt_logprobs[-NEW:])]
            for x, z in zip(sequences, outputs)]  # fmt: skip


def training_has_the_bits(window, batch, q, k, v, out):
    """Whether a call that computed whole sequences returned what the function for training returns."""
    window_size = (-1, -1) if window is None else (window - 1, 0)
    rows, longest = batch.rows, int(batch.seq_lens.max())
    with torch.enable_grad():
        cu_seqlens = batch.query_start_loc.clone()  # vLLM's tensors are those of its inference mode
        q, k, v = (x[:rows].clone().requires_grad_() for x in (q, k, v))
        expected = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, window_size=window_size
        )
    return torch.equal(out[:rows], expected)


def main(folder, name, rows):
    """rows: of a step at most."""
    save_model(folder, name)
    register()
    register()
    assert AttentionBackendEnum["DASH_ATTN"].get_class() is DashAttentionBackend
    # vLLM has one backend for CPUs, which this replaces.
    register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum["DASH_ATTN"].get_path())
    DashAttentionImpl.forward = recorded(DashAttentionImpl.forward)
    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, block_size=32, max_model_len=256,
        max_num_seqs=4, max_num_batched_tokens=rows, enable_prefix_caching=True, attention_backend="DASH_ATTN",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 256, (n,), generator=generator).tolist() for n in (70, 5, 40)]
    prompts += [[*prompts[0][:66], 3, 4], prompts[2][:35]]  # with whole pages of the first and the third
    together = generate(llm, prompts)
    sizes = sorted({len(batch.seq_lens) for batch, *_ in calls})
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone += generate(llm, [prompt])
    llm.reset_prefix_cache()
    pack = prefilled(llm, [x + y["tokens"] for x, y in zip(prompts, together)])
    whole = [call for call in calls if not call[0].past_lens.any() and int(call[0].seq_lens.min()) > 1]
    found = {
        "together": together, "alone": alone, "pack": pack, "batch sizes": sizes,
        "sequences of a pack": [len(batch.seq_lens) for batch, *_ in whole],
        "training": [training_has_the_bits(WINDOWS[name], *call) for call in whole],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
