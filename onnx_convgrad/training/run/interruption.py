"""Signals that end a run in good order: after the step under way, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from onnx_convgrad.training.run.callbacks import Callback

if TYPE_CHECKING:
    from onnx_convgrad.training.run.fit import Run

__all__ = ["Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(Callback):
    """Stops the run after SIGINT or SIGTERM, while it is entered; a second signal acts as it always does.

    Attributes:
        signal: The one that came.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def exit_status(self) -> int:
        """128 and the number of the signal, as shells have it; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    def on_begin(self, run: Run) -> None:
        self._check(run)

    def on_step(self, run: Run, results: Mapping[str, Any]) -> None:  # noqa: ARG002 - the signature of every callback
        self._check(run)

    def on_epoch(self, run: Run, row: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._check(run)

    def _check(self, run: Run) -> None:
        if self.signal is not None:
            run.stop()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.signal = signal.Signals(number)
        self.__exit__()
