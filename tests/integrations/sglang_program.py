"""Runs SGLang's engine on a CPU with dash_attn as its attention, and prints what test_sglang_engine.py compares.

SGLang's processes find the backend, and the recorder of its calls, through the entry points in a folder that the test
adds to the path. The batches have at least two sequences: SGLang's own functions differ on a CPU in a batch of one.
"""

import json
import os
import pathlib
import sys

import torch
from sglang_recorder import FOLDER
from transformers import LlamaConfig, LlamaForCausalLM

from dash_attn import flash_attn_varlen_func

NEW = 12


def save_model(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def generate(engine, name, numbers, prompts):
    """Generates for some of the prompts, in requests called NAME-NUMBER."""
    outputs = engine.generate(
        input_ids=[prompts[i] for i in numbers], rid=[f"{name}-{i}" for i in numbers], return_logprob=True,
        sampling_params={"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True},
    )  # fmt: skip
    return [
        {
            "number": number, "tokens": x["output_ids"],
            "log_probabilities": [value.hex() for value, *_ in x["meta_info"]["output_token_logprobs"]],
            "shared": x["meta_info"]["cached_tokens"],
        }
        for number, x in zip(numbers, outputs, strict=True)
    ]  # fmt: skip


def read_calls(folder):
    """The calls of requests pack-NUMBER, in which all sequences are whole, and the rows of all calls by places."""
    packs, rows = [], {}
    for path in sorted(pathlib.Path(folder).iterdir()):
        call = torch.load(path)
        starts = call["cu_seqlens"].tolist()
        for request, start, stop in zip(call["requests"], starts, starts[1:]):
            name, _, number = request.partition("-")
            for row in range(start, stop):
                key = (call["layer"], number, int(call["positions"][row]))
                rows.setdefault(key, {})[name] = [x[row] for x in call["q, k, v, out"]]
        if call["requests"][0].startswith("pack"):
            packs.append(call)
    return packs, rows


def training_has_the_bits(call):
    """Whether a call that computed whole sequences returned what the function for training returns."""
    *qkv, out = call["q, k, v, out"]
    cu_seqlens = call["cu_seqlens"]
    longest = int(cu_seqlens.diff().max())
    with torch.enable_grad():
        qkv = [x.clone().requires_grad_() for x in qkv]
        return torch.equal(out, flash_attn_varlen_func(*qkv, cu_seqlens, cu_seqlens, longest, longest, causal=True))


def main(folder):
    import sglang

    save_model(folder)
    engine = sglang.Engine(
        model_path=folder, device="cpu", attention_backend="dash_attn", page_size=32, skip_tokenizer_init=True,
        dtype="bfloat16", max_total_tokens=4096, max_running_requests=8, mem_fraction_static=0.1,
        disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 256, (n,), generator=generator).tolist() for n in (70, 5, 40)]
    prompts += [[*prompts[0][:66], 3, 4], prompts[2][:35]]  # with whole pages of the first and the third
    generate(engine, "first", [0, 2], prompts)
    together = generate(engine, "together", range(5), prompts)
    pairs = []
    for numbers in ([0, 1], [2, 3], [4, 0]):
        engine.flush_cache()
        pairs += generate(engine, "pair", numbers, prompts)
    engine.flush_cache()
    whole = [x + y["tokens"] for x, y in zip(prompts, together)]
    engine.generate(
        input_ids=whole, rid=[f"pack-{i}" for i in range(5)], sampling_params={"max_new_tokens": 1, "temperature": 0}
    )
    engine.shutdown()
    packs, rows = read_calls(os.environ[FOLDER])
    # Rows that have another row's q, k and v of all layers have its output.
    of_pack = {key: {name: [torch.equal(x, y) for x, y in zip(row, names["pack"])] for name, row in names.items()}
               for key, names in rows.items() if "pack" in names}  # fmt: skip
    found = {
        "together": together, "pairs": pairs, "sequences of a pack": [len(call["requests"]) for call in packs],
        "training": [training_has_the_bits(call) for call in packs],
        "rows": {name: sum(name in names for names in of_pack.values()) for name in ("together", "pair")},
        "equal": {name: sum(all(names.get(name, [])) and name in names for names in of_pack.values())
                  for name in ("together", "pair")},
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
