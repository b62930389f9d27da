"""Measures an older compiled library next to this one: `python -m benchmarks.run --baseline PATH`.

The library runs in a separate process, whose main module this is and which loads nothing else of the package, so the
ops and kernels of both versions cannot meet. The processes alternate: while one is timed, the other waits with an idle
GPU context. They exchange one line of JSON per request and per answer.

The GPU does the same work on both sides, but the host does not: the library's raw ops, `dash_attn_C::forward` and
`backward`, write into existing outputs, while ours are the public ops, which check their arguments and allocate the
forward's outputs. The host runs ahead of the GPU at these sizes, which hides the difference. It would count against us
in shorter calls.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import TextIO

import torch

from benchmarks import check, peers, timing
from benchmarks.library import POLICIES, Library
from benchmarks.peers import Calls, Tensors, Variant
from benchmarks.shapes import Shape

NAME = "baseline"
PASSES = ("forward", "backward")


def calls_of(library: Library, schedule: str, shape: Shape, x: Tensors) -> Calls:
    """Returns the raw ops of a library as calls, as `peers` does for the other implementations."""
    causal, *window_size = peers.mask_arguments(shape)
    scale = peers.softmax_scale(shape)
    variable = dict(window_size=tuple(window_size), attention_chunk=shape.chunk, cu_seqlens=x.cu_seqlens)
    out = torch.empty_like(x.dout)
    size = (shape.heads, len(x.q)) if shape.pack else (shape.batch, shape.heads, shape.seqlen)
    softmax_lse = torch.empty(size, dtype=torch.float32, device=x.q.device)
    gradients = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))

    def forward() -> torch.Tensor:
        library.forward(x.q, x.k, x.v, out, softmax_lse, scale, causal, **variable)
        return out

    def backward() -> tuple[torch.Tensor, ...]:
        library.backward(x.dout, x.q, x.k, x.v, out, softmax_lse, *gradients, scale, causal, schedule, **variable)
        return gradients

    forward()
    return {"forward": forward, "backward": backward}


class Remote:
    """A pass of the library in the other process, whose `block_ms` is called by `timing.measure`."""

    def __init__(self, ask, pass_: str, schedule: str):
        self._ask, self._request = ask, {"pass": pass_, "schedule": schedule}

    def block_ms(self, min_time_s: float) -> list[float]:
        return self._ask({"block": self._request, "min_time_s": min_time_s})


class Baseline:
    """An older library as an implementation for `benchmarks.run`.

    Args:
        command: the command that starts the answering process.
        schedules: policies of the library to measure, if they fit a shape's mask.
    """

    name = NAME

    def __init__(self, command: list[str], schedules: list[str]):
        self._schedules = schedules
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def of_library(cls, path: pathlib.Path, schedules: list[str], policies: list[str]) -> "Baseline":
        return cls([sys.executable, "-m", "benchmarks.baseline", str(path), "--policies", *policies], schedules)

    def variants(self, shape: Shape) -> list[Variant]:
        fitting = [] if shape.scores or shape.dropout_p else [s for s in self._schedules if fits(s, shape.mask)]
        return [Variant(self.name, schedule, True) for schedule in fitting]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> dict[str, Remote]:
        """Asks the process to make the same random tensors; `x` is not sent."""
        self._ask({"shape": shape.row(), "schedule": variant.schedule})
        return {pass_: Remote(self._ask, pass_, variant.schedule) for pass_ in PASSES}

    def _ask(self, request: dict):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the older library ended with exit status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def fits(schedule: str, mask: str) -> bool:
    of_one_mask = {"shift": "full", "symmetric_shift": "causal", "spt_descending": "causal"}
    return of_one_mask.get(schedule, mask) == mask


class Worker:
    """Answers the requests of a Baseline."""

    def __init__(self, library: Library, device: torch.device):
        self._library, self._device = library, device
        self._timer = timing.CudaTimer(device) if device.type == "cuda" else timing.HostTimer()
        self._shape = None
        self._calls: dict[str, Calls] = {}

    def prepare(self, shape: Shape, schedule: str) -> None:
        """Prepares the calls of a shape. Raises a RuntimeError if the library's results are wrong."""
        if shape != self._shape:
            self._calls = {}  # frees the tensors of the previous shape
            self._shape, self._tensors = shape, peers.random_tensors(shape, self._device)
            self._reference = check.Reference(shape, self._tensors)
        calls = calls_of(self._library, schedule, shape, self._tensors)
        for call in calls.values():
            if wrong := self._reference.wrong(call()):
                raise RuntimeError(wrong)
        self._calls[schedule] = calls

    def answer(self, request: dict):
        if "block" in request:
            call = self._calls[request["block"]["schedule"]][request["block"]["pass"]]
            return timing.block_ms(self._timer, call, request["min_time_s"])
        return self.prepare(Shape.of_row(request["shape"]), request["schedule"])

    def serve(self, requests: TextIO, answers: TextIO) -> None:
        for line in requests:
            try:
                answer = {"result": self.answer(json.loads(line))}
            except Exception as error:  # errors of the library are reported to the other process
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="policy names in the library's numbering")
    arguments = parser.parse_args()
    Worker(Library(arguments.library, arguments.policies), torch.device("cuda")).serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
