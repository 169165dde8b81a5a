"""Notice that training has diverged, before anything of it is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnx_convgrad.data.checks import check_labels, check_texts
from onnx_convgrad.data.datasets import Rows
from onnx_convgrad.errors import ArgumentError, DivergenceError, first_few
from onnx_convgrad.metrics.batch_weights import CLASS_LOSSES
from onnx_convgrad.training.engine import Engine
from onnx_convgrad.training.origin import OUTGROWN, origin_of

Arrays = Mapping[str, np.ndarray]

_REMEDY = "Check the data, and that all labels are valid classes; try a lower learning rate (--lr) or --clip-norm."

_REPLACE = "Check the data: leave these samples out, or replace such numbers, for example with numpy.nan_to_num."

_SMALLER = (
    "The updates are too large: try a lower learning rate (--lr), a warm-up (--warmup) or clip_norm (--clip-norm)."
)

_GROWN = 100
"""Parameters that are larger than before by this factor, or than 1, speak for updates that are too large."""

_STEPS = 25
"""Steps in a row without an update after which float16 training is given up, once the loss scale is below 1."""


def diverged(
    loss: float, where: str, steps: int, batches: Sequence[tuple[Arrays, Rows | None]], engine: Engine
) -> DivergenceError:
    """The error for a loss that is not finite; `where` names its step, the last of so many `steps`.

    `batches` are those of the step, each with the numbers of its samples in the data, if known.
    """
    ignored = engine.counts.ignored_targets([batch for batch, _ in batches if batch])
    if ignored:
        return DivergenceError(
            f"The loss is {loss} {where}. Every entry of {ignored[0]!r} there is ignored or has the weight 0, and the "
            f"mean of nothing is not a number.{_listed([r for _, r in batches])}",
            hint="Leave such samples out, shuffle the data, or give a larger batch size (--batch-size).",
        )
    unfit = [text for batch, _ in batches if batch and (text := _unfit(batch, engine))]
    if unfit:
        return DivergenceError(f"The loss is {loss} {where}. {unfit[0]}", hint="Leave this sample out.")
    spoiled = [text for batch, rows in batches for name in batch for text in _spoiled(batch[name], name, rows)]
    reason = f" In its data {' and '.join(spoiled)}." if spoiled else _listed([r for _, r in batches])
    hint, before = _REPLACE if spoiled else _REMEDY, None if spoiled else engine.before()
    earlier = None if before is None else _not_finite(before, engine)
    if earlier is not None:
        reason += f" The value {earlier!r} was not finite already before, after step {steps - 1}: its gradient was not."
    elif before is not None:
        text, hint = _cause([batch for batch, _ in batches if batch], before, steps, engine)
        reason += text
    return DivergenceError(f"The loss is {loss} {where}.{reason}", hint=hint)


def _unfit(batch: Arrays, engine: Engine) -> str:
    """The fault of a text or label of a batch, when only the output tells the number of frames or classes."""
    m = engine.manifest
    for term in m.losses:
        target, options = term["target"] or "", term["options"]
        facts = m.characters.get(target)
        unknown = term["loss"] in CLASS_LOSSES and not options.get("probabilities") and target not in m.classes
        if (facts is None and not unknown) or term["output"] not in m.outputs:
            continue
        shape = np.shape(engine.evaluate(batch, [term["output"]])[term["output"]])
        try:
            if facts is not None:
                frames = shape[0 if options.get("time_first") else 1]
                check_texts(target, batch, {**facts, "classes": shape[2]}, frames)
            else:
                axis = options.get("axis", 1) if len(shape) > 1 else 0
                check_labels(target, batch[target], shape[axis], options.get("ignore_index", -100))
        except ArgumentError as problem:
            return problem.message
    return ""


def _cause(batches: Sequence[Arrays], before: Arrays, steps: int, engine: Engine) -> tuple[str, str]:
    """Sentences about the place at which the first number of a step that is not finite arises, and the remedy.

    The step is the last of so many `steps`, `batches` are its own, and the values `before` it are finite.
    """
    weights = engine.counts.fed_weights()
    places = (origin_of(engine.program.model("gradients"), {**batch, **weights}, before) for batch in batches)
    found = next((origin for origin in places if origin is not None), None)
    if found is not None and not found.outgrown:
        return found.text, found.hint
    text, hint = ("", _REMEDY) if found is None else (found.text, found.hint)
    grown = _growth(before, engine)
    if grown:
        return text + grown, _SMALLER
    if steps == 1 and found is not None:
        return text, f"{OUTGROWN}. No update had been made yet, so that a lower learning rate does not help."
    return text, hint


def _growth(before: Arrays, engine: Engine) -> str:
    """A sentence about the parameter that has grown most since the start; empty if all are of about their first size."""
    sizes = {}
    for p in engine.manifest.parameters:
        if p.name in before and before[p.name].dtype.kind == "f" and before[p.name].size:
            first, now = (float(np.abs(a).max()) for a in (engine.initial(p.name), before[p.name]))
            sizes[p.name] = now / max(first, 1.0), first, now
    name, (ratio, first, now) = max(sizes.items(), key=lambda item: item[1], default=("", (0.0, 0.0, 0.0)))
    return f" The largest number of {name!r} has grown from {first:.2g} to {now:.2g}." if ratio > _GROWN else ""


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


def check_values(values: Arrays, engine: Engine, steps: int, batches: Sequence[Arrays] = ()) -> None:
    """Raise `DivergenceError` if a parameter or statistic is not finite, or state of the optimizer is NaN.

    Values that the program itself starts with, such as a mask of minus infinities, may stay so. The `batches` of the last of
    so many `steps` serve to find out where the values come from.
    """
    name = _not_finite(values, engine)
    if name is None:
        return
    before = engine.before() if batches else None
    fresh = before is not None and _not_finite(before, engine) is None
    text, hint = _cause(batches, before, steps, engine) if before is not None and fresh else ("", _REMEDY)
    raise DivergenceError(f"After step {steps} the value {name!r} is not finite.{text}", hint=hint)


def _not_finite(values: Arrays, engine: Engine) -> str | None:
    """The first parameter or statistic that is not finite, or state that is NaN."""
    stored = {entry.name for entry in engine.manifest.stored()}
    wrong = (
        name
        for name, array in values.items()
        if array.dtype.kind in "fV" and not _is_finite(array, nan_only=name not in stored)
    )
    return next((name for name in wrong if _is_finite(engine.initial(name), nan_only=False)), None)


def _is_finite(array: np.ndarray, *, nan_only: bool) -> bool:
    wide = array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16
    return not (np.isnan(wide) if nan_only else ~np.isfinite(wide)).any()


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
