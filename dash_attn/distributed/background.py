"""Runs blocking calls that cannot be interrupted in a thread, so that the caller can keep a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A call that starts immediately. A call that never returns does not keep the process alive."""

    def __init__(self, call: Callable[[], Result]):
        self._call = call
        self._result: Result
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # `wait` raises the error
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Result:
        """Waits for the call, and returns its result or raises its error.

        Raises:
            TimeoutError: the call did not end within `timeout_s` seconds.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"no answer for {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
        return self._result
