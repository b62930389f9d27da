"""What the ranks must agree on besides shapes and arguments: finite values, and which gradients exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .channel import Channel, RankError

Like = tuple[torch.Size, torch.dtype, torch.device]


def not_finite(named: Mapping[str, Tensor | None]) -> list[str]:
    """Returns the names of the tensors that hold a NaN or an infinity. Waits for their device."""
    return [name for name, x in named.items() if x is not None and not bool(x.isfinite().all())]


def require_finite(channel: Channel, what: str, records: list[dict]) -> None:
    for rank, record in enumerate(records):
        if record.get("values"):
            names = ", ".join(record["values"])
            raise RankError(f"{what} cannot be done: {names} of {channel.name([rank])} must be finite", (rank,))


def agreed_gradients(
    channel: Channel, what: str, dout: Tensor | None, dlse: Tensor | None, like: Sequence[Like], check_values: bool
) -> list[Tensor | None]:
    """Returns dout and dlse as every rank must use them: None if no rank has one, and 0 where only other ranks do.

    A gradient of 0 gives other bits than no gradient, in one process too.

    Args:
        like: tensors with the shape, dtype and device of dout and dlse; of dout alone if there is no log-sum-exp.
        check_values: whether the gradients must be finite.
    """
    named = {"dout": dout, "dlse": dlse}
    record: dict[str, Any] = {name: x is not None for name, x in named.items()}
    if check_values:
        record["values"] = not_finite({"dout": dout, "the gradient of softmax_lse": dlse})
    records = channel.exchange(what, record)
    require_finite(channel, what, records)
    agreed: list[Tensor | None] = []
    for number, (name, x) in enumerate(named.items()):
        if x is None and any(record[name] for record in records):
            shape, dtype, device = like[number]
            x = torch.zeros(shape, dtype=dtype, device=device)
        agreed.append(None if x is None else x.resolve_neg())  # ranks send bytes
    return agreed
