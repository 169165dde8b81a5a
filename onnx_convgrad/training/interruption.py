"""Stop a run on SIGINT or SIGTERM: after the current step, or batch of a validation, so that a checkpoint can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from onnx_convgrad.training.callbacks import Callback
from onnx_convgrad.training.protocols import Run

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(Callback):
    """Callback and context manager that stops the run on the first signal; a second one has its usual effect.

    Attributes:
        signal: The signal that was received, if any.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._run: Run | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python refuses handlers in other threads
            self._previous = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @property
    def exit_status(self) -> int:
        """128 plus the number of the signal, as in shells; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def on_begin(self, run: Run) -> None:
        self._run = run
        if self.signal is not None:
            run.stop()

    def on_end(self, run: Run) -> None:  # noqa: ARG002 - the signature of every callback
        self._run = None

    def _record(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.signal = signal.Signals(number)
        if self._run is not None:
            self._run.stop()
        self.__exit__()
