"""Real text that every machine has: the sources of Python's standard library, bytes as tokens."""

import hashlib
import pathlib
import sysconfig

import torch

VOCABULARY = 256


class Text:
    """One text, and batches of it that are functions of the seed and of the step alone.

    Args:
        path: a file, or a folder whose `*.py` are taken in the order of their names; None: the modules of the standard
            library of this Python that are single files.

    Raises:
        ValueError: there is no such file, or no `*.py` in the folder.
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
        """(sequences, seqlen + 1), int64: the tokens of a step, and the one behind each sequence.

        Raises:
            ValueError: the text is shorter than a sequence.
        """
        starts = self._tokens.numel() - seqlen
        if starts < 1:
            raise ValueError(f"--seqlen must be below the length of the text, {self._tokens.numel()}, got {seqlen}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        first = torch.randint(starts, (sequences,), generator=generator)
        return torch.stack([self._tokens[start : start + seqlen + 1] for start in first.tolist()]).long()
