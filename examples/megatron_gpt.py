"""Trains a small Megatron-core GPT twice and compares the bits: `python examples/megatron_gpt.py`.

The example needs megatron-core and runs in one process, with the kernels on a Hopper GPU and the reference elsewhere.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from dash_attn.integrations.megatron import with_dash_attention

VOCABULARY, SEQLEN, BATCH, STEPS = 512, 128, 2, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build() -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        hidden_dropout=0.0, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True,
    )  # fmt: skip
    spec = with_dash_attention(get_gpt_layer_local_spec())  # the only line that mentions dash_attn
    return GPTModel(config, spec, VOCABULARY, SEQLEN).to(DEVICE, torch.bfloat16)


def train() -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.arange(SEQLEN, device=DEVICE).expand(BATCH, -1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    first, second = train(), train()
    print("losses:", *(f"{loss:.4f}" for loss in first))
    print("the second run has the same losses, bit by bit" if first == second else "THE RUNS DIFFER")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
