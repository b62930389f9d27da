"""Calls that block and that nothing can interrupt, made in a thread so that the caller keeps a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A call that begins at once. The end of the process does not wait for a call that never returns."""

    def __init__(self, call: Callable[[], Result]):
        self._call = call
        self._result: Result
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # `wait` raises it
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Result:
        """What the call returns or raises.

        Raises:
            TimeoutError: the call has not ended within `timeout_s` seconds.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer for {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
        return self._result
