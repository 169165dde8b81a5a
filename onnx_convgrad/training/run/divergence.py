"""Notice that training has diverged, before anything of it is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnx_convgrad.errors import DivergenceError, first_few
from onnx_convgrad.training.data.datasets import Rows
from onnx_convgrad.training.run.batch_weights import Counts
from onnx_convgrad.training.run.engine import Engine

Arrays = Mapping[str, np.ndarray]

_REMEDY = "Check the data, and that all targets are valid classes; try a lower learning rate (--lr) or --clip-norm."

_STEPS = 25
"""Steps in a row without an update after which float16 training is given up, once the loss scale is below 1."""


def finite(loss: object) -> bool:
    """Whether a loss, or the sum of its entries, is finite."""
    return math.isfinite(np.sum(loss, dtype=np.float64))  # type: ignore[call-overload]


def diverged(
    loss: object, where: str, batches: Sequence[tuple[Arrays, Rows | None]], counts: Counts
) -> DivergenceError:
    """The error for a loss that is not finite; `where` names its step.

    `batches` are those of the step, each with the numbers of its samples in the data, if known.
    """
    total = np.sum(loss, dtype=np.float64)  # type: ignore[call-overload]
    ignored = counts.ignored_targets([batch for batch, _ in batches if batch])
    if ignored:
        return DivergenceError(
            f"The loss is {total} {where}. Every entry of {ignored[0]!r} there is ignored or has the weight 0, and the "
            f"mean of nothing is not a number.{_listed([r for _, r in batches])}",
            hint="Leave such samples out, shuffle the data, or give a larger batch size (--batch-size).",
        )
    spoiled = [text for batch, rows in batches for name in batch for text in _spoiled(batch[name], name, rows)]
    reason = f" In its data {' and '.join(spoiled)}." if spoiled else _listed([r for _, r in batches])
    return DivergenceError(f"The loss is {total} {where}.{reason}", hint=_REMEDY)


def _listed(several: Sequence[Rows | None]) -> str:
    """A sentence with the numbers of the samples, if they are known."""
    known = [range(r.start, r.stop) if isinstance(r, slice) else r for r in several if r is not None]
    numbers = [str(number) for rows in known for number in rows]
    return f" Its samples are {first_few(numbers, _NAMED)}, counted from 0." if numbers else ""


_NAMED = 8
"""Most samples that are listed."""


def _spoiled(array: np.ndarray, name: str, rows: Rows | None) -> list[str]:
    """Name the first sample with numbers that are not finite."""
    if array.dtype.kind != "f" or not array.ndim or np.isfinite(array).all():
        return []
    first = int(np.nonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))[0][0])
    if rows is None:
        return [f"{name!r} is not finite in sample {first} of the batch, counted from 0"]
    number = rows.start + first if isinstance(rows, slice) else rows[first]
    return [f"{name!r} is not finite in sample {number}, counted from 0"]


def check_values(values: Arrays, engine: Engine, steps: int) -> None:
    """Raise `DivergenceError` if a parameter or statistic is not finite, or state of the optimizer is NaN.

    Values that the program itself starts with, such as a mask of minus infinities, may stay so.
    """
    stored = {entry.name for entry in engine.manifest.stored()}
    for name, array in values.items():
        if array.dtype.kind != "f" or not (~np.isfinite(array) if name in stored else np.isnan(array)).any():
            continue
        if np.isfinite(engine.initial(name)).all():
            raise DivergenceError(f"After step {steps} the value {name!r} is not finite.", hint=_REMEDY)


class SkippedSteps:
    """Notices that float16 training updates nothing, because the gradients of all steps overflow at any loss scale."""

    def __init__(self, engine: Engine) -> None:
        slots = {s.slot: s.name for s in engine.manifest.state if s.of is None and s.kind == "optimizer"}
        self.engine, self.steps, self.since = engine, 0, 0
        self.names = [slots[slot] for slot in ("step", "loss_scale") if slot in slots]
        self.before = -1

    def count(self) -> None:
        """Called after every step; raises `DivergenceError`."""
        if len(self.names) < 2:  # no loss scale
            return
        self.steps += 1
        if self.steps % _STEPS == 0 or self.steps == 1:
            done, scale = (values.item() for values in self.engine.read(self.names).values())
            if self.steps > 1 and done == self.before and scale < 1:
                raise DivergenceError(
                    f"The last {self.steps - self.since} steps have changed no parameter: their gradients overflow in "
                    f"float16, even with a loss scale of {scale:.1e}.",
                    hint="Scale the data to about [-1, 1], or build the program with precision='float32' or "
                    "'bfloat16' (--precision).",
                )
            self.before, self.since = done, self.steps
