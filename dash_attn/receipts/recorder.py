"""Records a training run: fingerprints of its data, weights, activations, gradients and optimizer state, by step."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import replays
from .background import BackgroundWriter, Recorded
from .fingerprints import DEFAULT_BLOCK, block_span, check_block, part_of, sums_of_parts
from .shards import Shard, is_partial
from .store import Entry, Writer, rank_file
from .watch import Watch, tensors_in

DATA, WEIGHTS, ACTIVATION, ACTIVATION_GRADIENT = "data", "weights", "activation", "activation_gradient"
LOCAL_GRADIENT, GRADIENT, STATE, UPDATED_WEIGHTS = "local_gradient", "gradient", "state", "updated_weights"
BUFFERS, UPDATED_BUFFERS = "buffers", "updated_buffers"
KINDS = (
    DATA, WEIGHTS, BUFFERS, ACTIVATION, ACTIVATION_GRADIENT, LOCAL_GRADIENT, GRADIENT, STATE, UPDATED_WEIGHTS,
    UPDATED_BUFFERS,
)  # fmt: skip
"""The kinds of records: `weights` and `buffers` before a step, `updated_weights` after the optimizer's step and
`updated_buffers` after the whole step, `local_gradient` before the reduction over ranks, `gradient` as the optimizer
receives it, and the optimizer's `state` after its step."""
# Without a Shard, a plain tensor of these kinds is assumed to differ between ranks.
_LOCAL_KINDS = {DATA, BUFFERS, ACTIVATION, ACTIVATION_GRADIENT, LOCAL_GRADIENT, UPDATED_BUFFERS}

ShardOf = Callable[[str, torch.Tensor], "Shard | None"]

# One for the whole process, since autograd runs hooks on threads of its own.
_active: Recorder | None = None
# The recorders in a step, recorded or not, with the innermost last. All are of one thread.
_in_step: list[Recorder] = []
_in_step_lock = threading.Lock()


def tap(tensor: torch.Tensor, name: str, *, shard: Shard | None = None) -> torch.Tensor:
    """Records an activation where it is computed, and its gradient when autograd computes it. Returns `tensor` itself.

    Outside of a recorder's step, `tap` does nothing. Under torch.compile, `tap` breaks the graph.

    Args:
        tensor: the activation, a dense tensor or a DTensor.
        name: the name that identifies the tensor in both runs. One step may use a name several times.
        shard: the part of the whole that the tensor is, so that runs with different layouts can be compared. Without a
            Shard, a plain tensor belongs to its rank and is compared only between runs with the same number of ranks.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is not a dense tensor that holds its values.
        ValueError: `shard` does not fit the tensor.
    """
    if _active is not None:
        _active.tap(tensor, name, shard=shard)
    return tensor


class Recorder:
    """Writes the receipts of this process's rank into a folder, as `rank_00000.sqlite` and so on.

    Wrap each step in `step`, and close the recorder at the end (or use it as a context manager):

        with Recorder("receipts", model=model, optimizer=optimizer) as recorder:
            for number, batch in enumerate(batches):
                with recorder.step(number, data=batch):
                    loss = tap(model(batch), "loss")
                    loss.backward()
                    optimizer.step()

    Recording does not wait for the GPU: the sums are copied asynchronously, and a thread writes them.

    Args:
        path: the folder. The environment variable DASH_ATTN_RECEIPTS_PATH overrides it.
        model: the model whose parameters, gradients and buffers are recorded. Wrap and shard the model (DDP, FSDP2)
            before you create the recorder.
        optimizer: the optimizer whose state is recorded, and the gradients as the optimizer receives them.
        every: record only the steps whose numbers are multiples of this.
        blocks_every: keep the block sums of steps whose numbers are multiples of this. Other steps keep only the
            fingerprints of whole tensors.
        keep_blocks: also keep the block sums of this many of the last recorded steps.
        block: words of 4 bytes (or elements, if these are smaller) per block, a power of two from 8 to 2^24.
        kinds: the kinds to record, a subset of KINDS.
        taps: names of modules whose outputs are tapped, as in `model.named_modules()`. `*` stands for any one part
            between dots: `layers.*`, `layers.*.attention`.
        shard_of: a function that receives the name and the tensor of each parameter, gradient, optimizer state and
            buffer that is not a DTensor, and returns the part of the whole that the tensor is. None: a parameter is
            the whole, and a buffer belongs to its rank.
        replay: a shell command that runs step `{step}` again from a checkpoint. None: the command of this process.
        facts: anything else that identifies the run, such as its seed and parallel layout. `compare` shows the facts
            that differ.
        resume: continue existing receipts.

    Raises:
        FileExistsError: receipts of this rank exist, and `resume` is False.
        ValueError: an argument is invalid, or the existing receipts are damaged, belong to another run, or are being
            written by another recorder.
        OSError: SQLite cannot write into the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 1,
        blocks_every: int = 100,
        keep_blocks: int = 10,
        block: int = DEFAULT_BLOCK,
        kinds: Iterable[str] = KINDS,
        taps: Iterable[str] = (),
        shard_of: ShardOf | None = None,
        replay: str | None = None,
        facts: Mapping[str, object] | None = None,
        resume: bool = False,
    ) -> None:
        for name, value in (("every", every), ("blocks_every", blocks_every), ("keep_blocks", keep_blocks)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        check_block(block)
        self._kinds = frozenset((kinds,) if isinstance(kinds, str) else kinds)
        if unknown := sorted(self._kinds - set(KINDS)):
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {unknown}")
        if optimizer is not None and model is None:
            raise ValueError("model must be given together with optimizer, got None")
        self._every, self._blocks_every, self._keep, self._block = every, blocks_every, keep_blocks, block
        self._shard_of = shard_of
        self._rank, self._world_size = _rank_and_world_size()
        self._path = replays.path_of(path)
        self._wanted = replays.wanted()
        self._entries: list[Entry] = []
        self._sums: list[torch.Tensor] = []
        self._streams: set[torch.cuda.Stream] = set()
        # Entries whose sums have not been computed yet, with their tensors.
        self._pending: list[tuple[Entry, torch.Tensor]] = []
        self._is_together = False
        self._times: collections.Counter[tuple[str, str]] = collections.Counter()
        self._recent: collections.deque[int] = collections.deque()
        self._step: int | None = None
        self._thread = 0
        self._last: int | None = None
        self._closed = False
        self._watch = Watch(self, model, optimizer, tuple((taps,) if isinstance(taps, str) else taps))
        try:
            writer = Writer(rank_file(self._path, self._rank), self._meta(replay, facts), resume=resume)
        except BaseException:
            self._watch.remove()
            raise
        self._writer = BackgroundWriter(writer)

    def _meta(self, replay: str | None, facts: Mapping[str, object] | None) -> dict[str, str]:
        from dash_attn import __bits_version__, __version__, build_record

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        meta = {
            "rank": str(self._rank), "world_size": str(self._world_size), "block": str(self._block),
            "every": str(self._every), "dash_attn": __version__, "torch": torch.__version__,
            "bits version": str(__bits_version__), "library sources": build_record.library_sources(),
            "Python sources": build_record.python_sources(), "cuda": str(torch.version.cuda), "device": device,
            "host": platform.node(),
            "folder": str(pathlib.Path.cwd()), "command": replays.launch_command(), "replay": replay or "",
        }  # fmt: skip
        return meta | {f"fact {name}": json.dumps(value, default=str) for name, value in (facts or {}).items()}

    @property
    def is_recording(self) -> bool:
        """Whether a recorded step is in progress."""
        return self._step is not None

    @contextlib.contextmanager
    def step(self, number: int, data: Any = None, *, shard: Shard | None = None) -> Iterator[None]:
        """Returns a context manager for one step, which must enclose everything from the data to the optimizer.

        Args:
            number: the number of the step, from 0 to 2^63 - 1, larger than the number of the previous step.
            data: the data of the step: a tensor, or tensors in dicts, lists and tuples.
            shard: the part of the whole that each tensor of `data` is. None: the data belongs to this rank.

        Raises:
            ValueError: `number` is not an int in that range, or `data` holds no tensor.
            RuntimeError: the recorder is closed, another step is in progress, a recorder of another thread is in a
                step, or an earlier step could not be written.
        """
        global _active
        if self._closed:
            raise RuntimeError("the recorder is closed: create another one with resume=True")
        if not isinstance(number, int) or self._last is not None and number <= self._last:
            raise ValueError(f"number must be an int larger than the previous step's, {self._last}, got {number!r}")
        if not 0 <= number < 1 << 63:
            raise ValueError(f"number must be from 0 to 2^63 - 1, got {number}")
        if self._step is not None:
            raise RuntimeError(f"step {self._step} must end before another step begins, got step {number}")
        with self._without_other_threads(number):
            self._last = number
            if number % self._every:
                yield
                return
            self._step, before, complete = number, _active, False
            _active = self
            try:
                if data is not None:
                    self.data(data, shard=shard)
                self._watch.before_step()
                yield
                self._watch.after_step()
                complete = True
            finally:
                _active, self._step = before, None
                self._finish(number, complete)
        if self._wanted is not None and number >= self._wanted.step:
            self.close()
            print(f"replayed step {self._wanted.step}; the words of the block are in {self._path}", flush=True)
            raise SystemExit(0)

    @contextlib.contextmanager
    def _without_other_threads(self, number: int) -> Iterator[None]:
        """Refuses step `number` while a recorder of another thread is in a step, and keeps such recorders out of it."""
        with _in_step_lock:
            if _in_step and _in_step[-1]._thread != threading.get_ident():
                raise RuntimeError(
                    f"step {number} must not begin while the recorder of {_in_step[-1]._path} is in a step in another "
                    "thread: tap has one recorder for the whole process"
                )
            self._thread = threading.get_ident()
            _in_step.append(self)
        try:
            yield
        finally:
            with _in_step_lock:
                _in_step.remove(self)

    def _finish(self, number: int, complete: bool) -> None:
        entries, sums, streams = self._entries, self._sums, self._streams
        self._entries, self._sums, self._streams, self._times = [], [], set(), collections.Counter()
        self._recent.append(number)
        forget = self._recent.popleft() if len(self._recent) > self._keep else -1
        forget = -1 if forget % self._blocks_every == 0 else forget
        self._writer.put(Recorded(number, entries, sums, streams, complete, forget))

    def data(self, data: Any, name: str = "data", *, shard: Shard | None = None) -> None:
        """Records the training data within a step. The arguments are those of `step`."""
        found = list(tensors_in(data, name))
        if not found:
            raise ValueError(f"data must hold a tensor, got {type(data).__name__}")
        with self.together():
            for own_name, tensor in found:
                self.record(tensor, own_name, DATA, shard=shard)

    def tap(self, tensor: torch.Tensor, name: str, *, shard: Shard | None = None) -> torch.Tensor:
        """Records an activation and its gradient with this recorder, like the function `tap`."""
        return _tap(self, tensor, name, shard)

    def record(
        self, tensor: torch.Tensor, name: str, kind: str, *, shard: Shard | None = None, local: bool | None = None
    ) -> None:
        """Records a tensor's current value. Outside of a step and for a kind that is not recorded, nothing happens.

        Args:
            tensor: a dense tensor or a DTensor.
            name: the name that identifies the tensor in both runs.
            kind: one of KINDS.
            shard: the part of the whole that the tensor is. None: a DTensor's own part, or the whole.
            local: whether the tensor belongs to this rank alone, so that tensors of this name on other ranks are
                neither copies nor parts of it. None: true for kinds that differ between ranks, if there are several
                ranks and no shard.

        Raises:
            TypeError: `tensor` is not a dense tensor that holds its values, or `name` is not a str.
            ValueError: `kind` is not one of KINDS, or `shard` does not fit the tensor.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if self._step is None or kind not in self._kinds:
            return
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {name!r}")
        if is_partial(tensor):
            tensor, local = tensor.to_local(), True  # type: ignore[attr-defined]
        try:
            part, known = part_of(tensor, shard)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{kind} {name!r} cannot be recorded: {error}") from None
        if local is None:
            plain = part is tensor and shard is None
            local = self._world_size > 1 and plain and kind in _LOCAL_KINDS
        time = self._times[kind, name]
        self._times[kind, name] += 1
        self._pending.append((_entry(name, kind, time, part.dtype, known, local, self._block), part))
        if not self._is_together:
            self._compute()
        want = self._wanted
        if want is not None and (want.step, want.kind, want.name, want.time) == (self._step, kind, name, time):
            replays.dump(self._path, want, part, known, rank=self._rank, local=local, block=self._block)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Computes the sums of all tensors recorded within at the end, in one pass; none may change before that."""
        self._is_together = True
        try:
            yield
        finally:
            self._is_together = False
            self._compute()

    def _compute(self) -> None:
        pending, self._pending = self._pending, []
        self._streams.update(torch.cuda.current_stream(part.device) for _, part in pending if part.is_cuda)
        self._sums += sums_of_parts([(part, entry.shard) for entry, part in pending], self._block)
        self._entries += [entry for entry, _ in pending]

    def record_parameter(self, tensor: torch.Tensor, name: str, kind: str, parameter: str | None = None) -> None:
        """Records a parameter, a tensor of its shape, or a buffer. `shard_of` receives the name `parameter`."""
        shard = None
        if self._shard_of is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dim():
            shard = self._shard_of(parameter or name, tensor)
        self.record(tensor, name, kind, shard=shard)

    @property
    def world_size(self) -> int:
        """The number of ranks in the run."""
        return self._world_size

    def close(self) -> None:
        """Writes the remaining steps, removes the hooks and closes the file.

        Raises:
            RuntimeError: a step could not be written.
        """
        self._closed = True
        self._watch.remove()
        self._writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@torch.compiler.disable
def _tap(recorder: Recorder, tensor: torch.Tensor, name: str, shard: Shard | None) -> torch.Tensor:
    if recorder.is_recording:
        recorder.record(tensor, name, ACTIVATION, shard=shard)
        if tensor.requires_grad:

            def of_gradient(gradient: torch.Tensor) -> None:
                recorder.record(gradient, name, ACTIVATION_GRADIENT, shard=shard)

            tensor.register_hook(of_gradient)
    return tensor


@functools.lru_cache(maxsize=1 << 16)
def _entry(name: str, kind: str, time: int, dtype: torch.dtype, shard: Shard, local: bool, block: int) -> Entry:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"name must be text that UTF-8 can encode, got {name!r}") from None
    first, blocks = block_span(shard, dtype, block)
    return Entry(name, kind, time, str(dtype).removeprefix("torch."), shard, local, first, blocks)


def _rank_and_world_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
