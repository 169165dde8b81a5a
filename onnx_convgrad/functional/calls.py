"""Run the public functions: check and compile a call once, then only run it; or explain it.

Plans are cached by the arguments as passed, so a repeated call costs one look-up. Sessions are cached by the meaning of
the arguments, so `padding=1` and `padding=(1, 1)` share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.keys import frozen
from onnx_convgrad.functional.layouts import moved_axis
from onnx_convgrad.functional.plans import plan
from onnx_convgrad.functional.requests import Definition, Window, request
from onnx_convgrad.functional.sessions import Array, explained
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options

_REPORTS: ContextVar[list[Report] | None] = ContextVar("reports", default=None)
"""The list that calls append a report to instead of running."""


@dataclass(frozen=True, eq=False, slots=True)
class Function(Definition):
    """A public function: calling it checks, compiles and runs."""

    def __call__(
        self,
        arrays: Sequence[Any],
        window: Window,
        *,
        sizes: tuple[Any, Any, Any] = (None, None, None),
        mask: Sequence[bool] = (True,),
        lowering: Choosing = "auto",
        alpha: Any = 1,
        providers: Providers | None = None,
        options: Options | None = None,
    ) -> tuple[Any, ...]:
        """The results, `None` where `mask` is false.

        Args:
            arrays: One for each of `self.arrays`, or `None`.
            window: stride, padding, dilation, transposed, output_padding and groups.
            sizes: Those of input, weight and bias where there is no array.
            mask: Which results are wanted.
            lowering: How gradients are computed.
            alpha: The factor of the array `z`.
            providers: Execution providers.
            options: Options of the session.
        """
        operands = [a if a is None or (type(a) is np.ndarray and a.dtype.isnative) else _array(a) for a in arrays]
        signature = tuple([None if a is None else (a.shape, a.dtype, moved_axis(a)) for a in operands])
        rest = [frozen(value) for value in (sizes, window, mask, lowering, alpha, providers, options)]
        reports = _REPORTS.get()
        if reports is None:
            return plan(self, signature, *rest).run(operands)
        reports.append(explained(request(self, signature, *rest)))
        return (None,) * len(self.results)


@contextmanager
def explaining() -> Iterator[list[Report]]:
    """Let calls within the block append a report to the list instead of running; their results are `None`."""
    reports: list[Report] = []
    token = _REPORTS.set(reports)
    try:
        yield reports
    finally:
        _REPORTS.reset(token)


def _array(values: Any) -> Array:
    try:
        array = np.asarray(values)
    except Exception as problem:
        raise ArgumentError(
            f"An operand of type {type(values).__name__} cannot become an array: {problem}."
        ) from problem
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
