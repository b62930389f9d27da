"""Text that every machine has: the sources of Python's standard library, with bytes as tokens."""

import hashlib
import pathlib
import sysconfig

import torch

VOCABULARY = 256


class Text:
    """A text, and batches of it that depend only on the seed and the step.

    Args:
        path: a file, or a folder whose `*.py` files are read in the order of their names; None: the single-file modules
            of this Python's standard library.

    Raises:
        ValueError: there is no such file, or the folder has no `*.py` files.
    """

    def __init__(self, path: str | None = None) -> None:
        where = pathlib.Path(path or sysconfig.get_paths()["stdlib"])
        files = sorted(where.glob("*.py")) if where.is_dir() else [where] if where.is_file() else []
        if not files:
            raise ValueError(f"--text must be a file, or a folder with *.py files, got {str(where)!r}")
        content = b"".join(file.read_bytes() for file in files)
        self.description = f"{len(files)} files, {len(content)} bytes of {where}"
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def batch(self, step: int, *, seed: int, sequences: int, seqlen: int) -> torch.Tensor:
        """Returns the tokens of a step, int64 (sequences, seqlen + 1): each sequence and the token after it.

        Raises:
            ValueError: the text is shorter than a sequence.
        """
        starts = self._tokens.numel() - seqlen
        if starts < 1:
            raise ValueError(f"--seqlen must be below the length of the text, {self._tokens.numel()}, got {seqlen}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        first = torch.randint(starts, (sequences,), generator=generator)
        return torch.stack([self._tokens[start : start + seqlen + 1] for start in first.tolist()]).long()
