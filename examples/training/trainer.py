"""One step of training: FSDP2 over all ranks, with sums over ranks in the order of the ranks or in torch's order."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dash_attn.receipts import tap

from . import ordered
from .attention import make_attention
from .clock import Clock
from .layout import Layout
from .model import Llama, Shape

CLIP = 1.0


def context_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """Returns the mesh of the ranks that share this rank's sequences; None if this rank is alone."""
    if layout.context == 1:
        return None
    mesh = init_device_mesh(device.type, (layout.groups, layout.context), mesh_dim_names=("data", "context"))
    return mesh["context"]


class Trainer:
    """A model and its optimizer, with fp32 weights that are sharded over all ranks and used in bf16.

    Args:
        shape: the shape of the model.
        layout: the part of the batch that this rank has.
        device: the device of this rank.
        attention: one of `attention.ATTENTION`.
        deterministic: whether everything except attention is deterministic.
        learning_rate: the learning rate of the optimizer.
        seed: the seed of the weights.
        clock: the clock that measures the model.
    """

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        device: torch.device,
        *,
        attention: str,
        deterministic: bool,
        learning_rate: float,
        seed: int,
        clock: Clock,
    ) -> None:
        if layout.context > shape.kv_heads:
            raise ValueError(f"--context-parallel must be at most --kv-heads {shape.kv_heads}, got {layout.context}")
        self.layout, self.device = layout, device
        self._mesh = context_mesh(layout, device)
        attend = make_attention(attention, self._mesh, layout.order)
        self.model = Llama(shape, attend, clock, layout, seed).to(device)
        self._reduce_scatter = ordered.ReduceScatter(deterministic)
        mesh = init_device_mesh(device.type, (layout.ranks,))
        # The angles of the rotary positions stay in fp32.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=precision)
            module.set_custom_reduce_scatter(self._reduce_scatter)
            # Losses are divided by the tokens of all ranks, so their gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.set_deterministic(deterministic)

    def set_deterministic(self, deterministic: bool) -> None:
        """Sets whether everything except attention is deterministic, from the next step on."""
        self.deterministic = self._reduce_scatter.ordered = deterministic

    def set_attention(self, name: str) -> None:
        """Sets the attention from the next step on."""
        attend = make_attention(name, self._mesh, self.layout.order)
        for layer in self.model.layers:
            layer.attention.attend = attend

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Trains on this rank's part of a batch, int64 (sequences, rows), without waiting for the GPU.

        Returns:
            The loss of the whole batch, fp32 on the device.
        """
        with ordered.deterministic_torch(self.deterministic):
            loss = tap(self.model(tokens, targets) / self.layout.tokens, "loss")
            loss.backward()
            if self.deterministic:
                ordered.clip_gradients(self.parameters, CLIP)
            else:
                torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return ordered.all_ranks_sum(loss)
