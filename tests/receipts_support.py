"""A small model that is trained under a Recorder, and single bits that flip at a place of its step."""

import torch

from dash_attn.receipts import Recorder, tap

STEPS = 4
BLOCK = 8  # words
WIDTH = 12


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, WIDTH)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return tap(x, "features").square().mean()


def flip(tensor, element, bit):
    """One bit of one element, in place; of a transposed tensor too."""
    with torch.no_grad():
        size = tensor.dtype.itemsize
        words = tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        place = []
        for length in reversed(tensor.shape):
            element, coordinate = divmod(element, length)
            place.append(coordinate)
        high = bit == 8 * size - 1
        words[tuple(place[::-1])] ^= -(1 << bit) if high else 1 << bit


class Plant:
    """Flips bit `bit` of element `element` of a thing when `step` is being trained."""

    def __init__(self, thing=None, *, step=2, element=21, bit=3):
        self.thing, self.step, self.element, self.bit = thing, step, element, bit
        self.now = None

    def __call__(self, thing, tensor):
        if (self.thing, self.step) == (thing, self.now):
            flip(tensor, self.element, self.bit)

    def copy_of(self, thing, tensor):
        if (self.thing, self.step) != (thing, self.now):
            return None
        tensor = tensor.clone()
        self(thing, tensor)
        return tensor

    def hook(self, model, optimizer):
        """Before a recorder's own hooks, which see what these have done."""
        layer = model.layers[1]

        def output(_, __, out):
            out = self.copy_of("activation", out)
            return out

        def gradient(_, __, out):
            if out.requires_grad:
                out.register_hook(lambda g: self.copy_of("activation_gradient", g))

        def updated(*_):
            if layer.weight in optimizer.state:
                self("state", optimizer.state[layer.weight]["exp_avg"])
            self("updated_weights", layer.weight)

        layer.register_forward_hook(output)
        layer.register_forward_hook(gradient)
        layer.weight.register_post_accumulate_grad_hook(lambda p: self("gradient", p.grad))
        optimizer.register_step_post_hook(updated)


def batch_of(step):
    return torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(step))


def make():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(path, plant=None, *, steps=range(STEPS), made=None, **options):
    """Trains from the first of `steps` on, and leaves receipts in `path`."""
    plant = plant or Plant()
    model, optimizer = made or make()
    plant.hook(model, optimizer)
    options = {"block": BLOCK, "taps": ["embedding", "layers.*"]} | options
    with Recorder(path, model=model, optimizer=optimizer, **options) as recorder:
        for step in steps:
            plant.now = step
            batch = {"tokens": batch_of(step), "weights": torch.linspace(0, 1, 24)}
            plant("data", batch["weights"])
            plant("weights", model.layers[1].weight)
            with recorder.step(step, data=batch):
                loss = tap(model(batch["tokens"]) + batch["weights"].sum(), "loss")
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    return model, optimizer
