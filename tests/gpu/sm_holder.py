"""Holds SMs of the current device, as a communication kernel would, while the tests run something else."""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import time

import torch

SOURCE = pathlib.Path(__file__).with_name("sm_holder.cu")


def find_nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (nvcc := shutil.which("nvcc", path=os.path.join(home, "bin"))):
            return nvcc
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build(folder: pathlib.Path, nvcc: str) -> pathlib.Path:
    library = folder / "libsm_holder.so"
    command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class SmHolder:
    def __init__(self, library: pathlib.Path, num_sms: int):
        self._hold = ctypes.CDLL(str(library)).hold_sms
        self._hold.restype = ctypes.c_int
        self._hold.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p]
        self._resident = torch.zeros(num_sms, dtype=torch.int32, pin_memory=True)
        self._release = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._released = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._stream = torch.cuda.Stream()
        self._release_stream = torch.cuda.Stream()
        self._ended = torch.cuda.Event()

    def holding(self) -> bool:
        """False once the kernel has ended, by release or by its time limit."""
        return not self._ended.query()

    def resident(self, sms: int) -> int:
        """How many of the CTAs of the last launch, of `sms`, hold an SM or have held one."""
        return int(self._resident.numpy()[:sms].sum())

    @contextlib.contextmanager
    def prepared(self, sms: int, limit_s: float):
        """Yields a function that launches a kernel which holds `sms` SMs until exit, or for `limit_s`, so that a caller
        that hangs is let go. Everything the caller launches meanwhile must have run once before: loading a kernel waits
        for the device."""
        torch.cuda.synchronize()
        self._resident.zero_()
        self._release.zero_()
        torch.cuda.synchronize()

        def launch() -> None:
            error = self._hold(
                sms,
                self._resident.data_ptr(),
                self._release.data_ptr(),
                int(limit_s * 1e9),
                self._stream.cuda_stream,
            )
            if error:
                raise RuntimeError(f"hold_sms({sms}) returned CUDA error {error}")
            self._ended.record(self._stream)

        try:
            yield launch
        finally:
            # By a copy engine: a kernel might find no SM.
            with torch.cuda.stream(self._release_stream):
                self._release.copy_(self._released, non_blocking=True)
            self._stream.synchronize()

    @contextlib.contextmanager
    def hold(self, sms: int, limit_s: float):
        """`sms` SMs are held on entry, until exit or for `limit_s`; see `prepared`."""
        with self.prepared(sms, limit_s) as launch:
            launch()
            deadline = time.monotonic() + limit_s
            while self.resident(sms) < sms:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"only {self.resident(sms)} of {sms} CTAs came to hold an SM")
            yield
