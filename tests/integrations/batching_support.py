"""Rollouts of transformers' continuous batching, compared with a forward for training."""

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers_support import positions

NEW = 12


def by_rows(model):
    """Makes everything but attention compute each row alone, and returns the numbers of rows of the calls of a layer.

    torch's products promise no bits for a row of two batches.
    """
    counts = []

    def each_row(module, forward):
        def forward_rows(x, *args, **kwargs):
            if module is model.model.layers[0].self_attn.q_proj:
                counts.append(x.shape[1])
            rows = [forward(row.clone(), *args, **kwargs) for row in x.split(1, dim=1)]
            if isinstance(rows[0], tuple):  # the experts of gpt_oss, with scores that nothing reads
                return torch.cat([row for row, _ in rows], dim=1), None
            return torch.cat(rows, dim=1)

        return forward_rows

    for layer in model.model.layers:
        norms = [child for child in layer.children() if "Norm" in type(child).__name__]
        for module in (*norms, layer.mlp, *layer.self_attn.children()):
            module.forward = each_row(module, module.forward)
    for module in (model.model.norm, model.lm_head):
        module.forward = each_row(module, module.forward)
    return counts


def batches_of_paged_calls(patch):
    """Returns a list that receives the batch size of every call that reads pages."""
    batches, with_cache = [], flash_utils._flash_with_kvcache_fn

    def counted(q, *args, **kwargs):
        batches.append(q.shape[0])
        return with_cache(q, *args, **kwargs)

    patch.setattr(flash_utils, "_flash_with_kvcache_fn", counted)
    return batches


def generate(model, **changes):
    """Generates for prompts of which the last begins with most of the first, and is scheduled after it."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in (40, 5, 21)]
    prompts.append([*prompts[0][:36], 3, 4])
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=32, max_batch_tokens=40, max_blocks_per_request=8, return_logprobs=True,
        **{"use_cuda_graph": False, "use_async_batching": False} | changes,
    )  # fmt: skip
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
    outputs = [outputs[key] for key in sorted(outputs)]
    assert [x.prompt_ids for x in outputs] == prompts and all(len(x.generated_tokens) == NEW for x in outputs)
    return outputs


def check_against_a_pack(model, outputs):
    """The log-probabilities of a forward for training, with all sequences in one pack, have the same bits."""
    device = model.device
    sequences = [torch.tensor(x.prompt_ids + x.generated_tokens, device=device) for x in outputs]
    lengths = [len(x) - 1 for x in sequences]
    ids = torch.cat([x[:-1] for x in sequences])[None]
    logits = model(ids, position_ids=positions(lengths).to(device)).logits
    assert logits.requires_grad
    probabilities = torch.softmax(logits[0].float(), dim=-1)
    following = torch.cat([x[1:] for x in sequences])[:, None]
    log_probabilities = probabilities.gather(1, following).squeeze(1).log().split(lengths)
    for output, expected in zip(outputs, log_probabilities, strict=True):
        assert torch.equal(torch.tensor(output.logprobs), expected[-NEW:].cpu())
