"""Tiny Megatron-core models on one process or several, on a GPU or, with stand-ins for what wants one, on a CPU."""

import contextlib
import os
import pathlib
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.transformer_config import TransformerConfig
from rounded import distances, rounded

from dash_attn.integrations.megatron import with_dash_attention

VOCABULARY, SEQLEN, HIDDEN_SIZE = 96, 40, 64


class _NoDropout:
    """Stands for the tracker of the states of CUDA's random numbers."""

    def fork(self, *_):
        return contextlib.nullcontext()

    def get_states(self):
        return {}

    def set_states(self, _):
        pass


def _window_mask(sq, skv, window_size):
    """True where a query does not see a key."""
    distance = torch.arange(skv) - torch.arange(sq)[:, None] - (skv - sq)
    return (distance < -window_size[0]) | (distance > window_size[1])


@contextlib.contextmanager
def without_gpu():
    """Megatron asks for the current GPU where a CPU would do."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
            for module in (tensor_parallel, tensor_parallel_random):
                stack.enter_context(mock.patch.object(module, "get_cuda_rng_tracker", _NoDropout))
            for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
                stack.enter_context(mock.patch.object(tensor_parallel_random, name, lambda *_, **__: None))
            stack.enter_context(mock.patch.object(fused_softmax, "get_sliding_window_causal_mask", _window_mask))
        yield


@contextlib.contextmanager
def process_group(store: pathlib.Path, rank: int = 0, ranks: int = 1, backend: str = "gloo"):
    """Megatron's groups with tensor parallelism over all ranks."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        with without_gpu():
            if torch.cuda.is_available():
                tensor_parallel.model_parallel_cuda_manual_seed(0)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config_of(dtype=torch.bfloat16, **settings) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": HIDDEN_SIZE, "num_attention_heads": 4, "attention_dropout": 0.0}
    sizes["tensor_model_parallel_size"] = parallel_state.get_tensor_model_parallel_world_size()
    sizes |= {"use_cpu_initialization": True, "hidden_dropout": 0.0, "masked_softmax_fusion": False}
    sizes |= {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    return TransformerConfig(**sizes | settings)


def gpt(dash: bool, dtype=torch.bfloat16, device="cpu", seed=0, seqlen=SEQLEN, **settings) -> GPTModel:
    """A model whose parameters are the same for either attention, of any number of ranks."""
    torch.manual_seed(seed)
    config = config_of(dtype, **settings)
    spec = get_gpt_layer_local_spec()
    embeddings = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
    model = GPTModel(config, with_dash_attention(spec) if dash else spec, VOCABULARY, seqlen, **embeddings)
    return model.to(device, dtype)


def gpt_in_float32(dash: bool, dtype=torch.bfloat16, **arguments) -> GPTModel:
    """`gpt` with all but the core attention in float32, and that in `dtype`: see rounded.py.

    Its weights are large enough for attention to be uneven: that of Megatron's own is nearly a mean over all keys.
    """
    deviation = 1.6 / arguments.get("hidden_size", HIDDEN_SIZE) ** 0.5
    model = gpt(dash, dtype, init_method_std=deviation, **arguments).float()
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.register_forward_pre_hook(lambda _, given: (*(rounded(x, dtype) for x in given[:3]), *given[3:]))
        core.register_forward_hook(lambda _, given, out: out.float())
    return model


def tokens(batch=2, seqlen=SEQLEN, device="cpu") -> dict[str, torch.Tensor]:
    """The arguments of a GPTModel; the mask is True where a query does not see a key."""
    ids = torch.randint(VOCABULARY, (batch, seqlen + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "position_ids": torch.arange(seqlen, device=device).expand(batch, -1),
        "attention_mask": torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device=device).triu(1),
    }


def loss_and_gradients(model: GPTModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).float().mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def accuracy(inputs: dict[str, torch.Tensor], draws: int, ours_in=contextlib.nullcontext, **arguments):
    """Of the loss and of each gradient by name: how far ours and Megatron's attention in bf16 are off, over `draws`.

    `ours_in` makes a context for each run with ours.
    """
    found: dict[str, list] = {"ours": [], "theirs": [], "exact": []}
    for seed in range(draws):
        theirs, ours = (gpt_in_float32(dash, seed=seed, **arguments) for dash in (False, True))
        exact = gpt_in_float32(False, torch.float32, seed=seed, **arguments)
        exact.load_state_dict(theirs.state_dict())
        for name, model in (("theirs", theirs), ("exact", exact)):
            found[name].append(loss_and_gradients(model, inputs))
        with ours_in():
            found["ours"].append(loss_and_gradients(ours, inputs))
    assert all(x.keys() == found["exact"][0].keys() for results in found.values() for x in results)
    values = {name: [list(x.values()) for x in results] for name, results in found.items()}
    off = (distances(values[name], values["exact"]) for name in ("ours", "theirs"))
    return dict(zip(found["exact"][0], zip(*off, strict=True), strict=True))


def rank_environment() -> None:
    """Of a process that a test starts."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
