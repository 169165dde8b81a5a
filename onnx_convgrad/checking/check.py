"""`check`: the gradients of an augmented model against the model itself, and against PyTorch.

For each value x, a random direction v: <gradient, v> is compared with the central difference of L = sum <target, seed>
along v. L is evaluated in float64 wherever possible, so that a step can be small enough to pass few kinks of Relu or
MaxPool. The error is relative to |gradient|; a gradient below 1e-3 of the largest is measured against that, since
float32 does not resolve it further.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.checking.double import Primal, narrow_primal, primal_function
from onnx_convgrad.checking.feeds import working_feed
from onnx_convgrad.checking.torch_check import available, torch_gradients
from onnx_convgrad.errors import ExecutionError, ModelError
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.parameters import named_values, resolve_of
from onnx_convgrad.passes.canonicalize import InputShapes
from onnx_convgrad.pipeline import SEEDS_KEY, AnyModel, Built, Names, build
from onnx_convgrad.runtime import session

__all__ = ["CheckReport", "Row", "check", "verify_numerically"]

Arrays = Mapping[str, np.ndarray]
Progress = Callable[[str], None]

_LIMITS = {ir.DataType.DOUBLE: 1e-5, ir.DataType.FLOAT16: 3e-2, ir.DataType.BFLOAT16: 1e-1}
_LIMIT = 1e-3
_KINKS = 1e-2
_FLOAT32_LIMIT = 3e-2
_FLOOR = 1e-3
_LIMIT_OF_PROTO = 2**31


@dataclass(frozen=True, slots=True)
class Row:
    """One gradient: its norm, its relative errors (`None` where there was nothing to compare with), the verdict."""

    value: str
    output: str
    shape: tuple[int, ...]
    norm: float
    numeric: float | None
    numeric_limit: float
    torch: float | None
    torch_limit: float
    ok: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Every gradient's verdict, the inputs used and how precise the comparison was."""

    rows: tuple[Row, ...]
    inputs: Mapping[str, tuple[int, ...]]
    precision: str
    pytorch: str
    seed: int

    @property
    def passed(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        rows = [{**asdict(row), "shape": list(row.shape)} for row in self.rows]
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        head = {"passed": self.passed, "precision": self.precision, "pytorch": self.pytorch, "seed": self.seed}
        return {**head, "inputs": inputs, "rows": rows}


def check(
    model: AnyModel,
    *,
    wrt: Names = "all",
    of: Names | None = None,
    training: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    input_shapes: InputShapes | None = None,
    seed: int = 0,
    samples: int = 1,
    progress: Progress = lambda _: None,
) -> CheckReport:
    """Augment `model` and compare its gradients with numeric ones, and with PyTorch's where that is installed.

    Args:
        model: As for `augment`, like the six that follow.
        wrt: What to check; by default all floating inputs and parameters.
        of: The targets.
        training: BatchNormalization with batch statistics.
        target: For which the gradients are lowered.
        lowering: Forced lowerings.
        input_shapes: Shapes of inputs; free sizes are found by trial.
        seed: Of the random inputs, cotangents and directions.
        samples: Random directions per value.
        progress: Told what is going on.

    Raises:
        ModelError: No inputs were found on which the model runs; it holds more than 2 GB.
        ConvGradError: What `augment` raises.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        training=training,
        target=target,
        lowering=lowering,
        input_shapes=input_shapes,
        progress=progress,
    )
    return verify_numerically(built, of=of, seed=seed, samples=samples, progress=progress)


def verify_numerically(
    built: Built, *, of: Names | None = None, seed: int = 0, samples: int = 1, progress: Progress = lambda _: None
) -> CheckReport:
    """`check` for a model that is already built; `of` is what it was built with."""
    primal = built.primal
    size = sum(v.const_value.nbytes for v in built.model.graph.initializers.values() if v.const_value is not None)
    if size >= _LIMIT_OF_PROTO:
        raise ModelError("A model of more than 2 GB cannot be checked.", hint="Check a smaller variant of it.")
    _refuse_random(primal)
    progress("finding inputs")
    targets = [v.name or "" for v in resolve_of(primal.graph, of)]
    feed, outputs = working_feed(list(primal.graph.inputs), narrow_primal(primal, targets), seed)
    generator = np.random.default_rng(seed + 1)
    taken = json.loads(built.model.metadata_props[SEEDS_KEY])
    seeds = {
        t: generator.standard_normal(y.shape).astype(y.dtype) if t in taken else np.ones_like(y)
        for t, y in outputs.items()
    }
    progress("running the gradients")
    gradients = _run(built, {**feed, **{taken[t]: s for t, s in seeds.items() if t in taken}})
    report = _Comparison(built, feed, seeds, gradients, generator, samples, progress)
    return report.run(seed)


def _refuse_random(primal: ir.Model) -> None:
    for node in primal.graph:
        flag = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
        drops = flag is not None and flag.const_value is not None and bool(flag.const_value.numpy().all())
        if drops or node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial"):
            raise ModelError(
                f"Node {node.name!r} ({node.op_type}) draws random numbers, so that two runs cannot be compared.",
                hint="Check without --training." if drops else "",
            )


def _run(built: Built, feed: Arrays) -> dict[str, np.ndarray]:
    live = session(built.model)
    names = list(built.gradients.values())
    wanted = {i.name for i in live.get_inputs()}
    try:
        found = live.run(names, {k: v for k, v in feed.items() if k in wanted})
    except Exception as problem:
        raise ExecutionError(f"ONNX Runtime failed to run the gradients: {problem}") from problem
    return dict(zip(built.gradients, found, strict=True))


class _Comparison:
    """One set of inputs and seeds, and what each gradient is compared with."""

    def __init__(
        self,
        built: Built,
        feed: Arrays,
        seeds: Arrays,
        gradients: Arrays,
        generator: np.random.Generator,
        samples: int,
        progress: Progress,
    ) -> None:
        self.built, self.feed, self.seeds, self.gradients = built, feed, seeds, gradients
        self.generator, self.samples, self.progress = generator, samples, progress
        self.points = self._points()
        self.norms = {k: float(np.linalg.norm(_wide(g))) for k, g in gradients.items()}
        self.floor = max(_FLOOR * max(self.norms.values(), default=0.0), 1e-12)
        values = named_values(built.primal.graph)
        self.limits = {k: _LIMITS.get(values[k].dtype or ir.DataType.FLOAT, _LIMIT) for k in gradients}
        self.function = self._function()

    def _points(self) -> dict[str, np.ndarray]:
        """What is fed for each differentiated value; zeros shift an intermediate one."""
        points = {}
        values = named_values(self.built.primal.graph)
        for name, gradient in self.gradients.items():
            stored = values[name].const_value
            if name in self.feed:
                points[name] = self.feed[name]
            elif stored is not None:
                points[name] = stored.numpy()
            else:
                points[f"{name}__shift"] = np.zeros_like(gradient)
        return points

    def _function(self) -> Primal:
        """The primal in float64; in float32 where that cannot be built or run."""
        self.progress("preparing the model in float64")
        primal, targets = self.built.primal, list(self.seeds)
        moved = list(self.gradients)
        try:
            function = primal_function(primal, targets, moved, double=True)
            if all(np.isfinite(v).all() for v in function({**self.feed, **self.points}).values()):
                return function
        except Exception as problem:  # noqa: BLE001 - whatever the reason, float32 is the honest second choice
            self.progress(f"no float64 evaluation: {problem}")
        return primal_function(primal, targets, moved, double=False)

    def run(self, seed: int) -> CheckReport:
        self.progress("asking PyTorch")
        torch_errors, torch_limits, note = self._torch()
        rows = []
        for count, (name, output) in enumerate(self.built.gradients.items(), 1):
            self.progress(f"numeric derivative {count}/{len(self.gradients)}: {name}")
            rows.append(self._row(name, output, torch_errors.get(name), torch_limits.get(name)))
        precision = "float64" if self.function.double else "float32"
        shapes = {k: v.shape for k, v in self.feed.items()}
        return CheckReport(tuple(rows), shapes, precision, note, seed)

    def _row(self, name: str, output: str, torch: float | None, torch_limit: float | None) -> Row:
        limit = max(self.limits[name], torch_limit or 0.0)
        numeric_limit = limit if self.function.double else max(limit, _FLOAT32_LIMIT)
        if torch is not None and torch <= limit:  # what is left of a numeric error is kinks that the step crosses
            numeric_limit = max(numeric_limit, _KINKS)
        numeric = max(self._numeric(name, numeric_limit) for _ in range(self.samples))
        finite = bool(np.isfinite(self.gradients[name]).all())
        ok = finite and numeric <= numeric_limit and (torch is None or torch <= limit)
        return Row(name, output, self.gradients[name].shape, self.norms[name], numeric, numeric_limit, torch, limit, ok)

    # -- numeric -------------------------------------------------------------------------------------------------------

    def _numeric(self, name: str, limit: float) -> float:
        """Error of the directional derivative relative to |gradient|, for one random direction."""
        gradient = _wide(self.gradients[name])
        key = name if name in self.points else f"{name}__shift"
        point = _wide(self.points[key])
        direction = self.generator.standard_normal(gradient.shape)
        exact = float(np.vdot(gradient, direction))
        scale = max(self.norms[name], self.floor)
        size = max(float(np.sqrt(np.mean(point**2))) if point.size else 0.0, 1e-2)
        if not self.function.double:
            steps = [size * s for s in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)]
            return abs(_agreed([self._slope(key, point, direction, s) for s in steps]) - exact) / scale
        errors = []
        for step in (1e-5, 3e-7, 1e-8):  # a kink in between spoils a step; a smaller one passes fewer of them
            errors.append(abs(self._slope(key, point, direction, size * step) - exact) / scale)
            if errors[-1] <= limit:
                break
        return min(errors)

    def _slope(self, key: str, point: np.ndarray, direction: np.ndarray, step: float) -> float:
        return (self._loss(key, point + step * direction) - self._loss(key, point - step * direction)) / (2 * step)

    def _loss(self, key: str, moved: np.ndarray) -> float:
        dtype = np.float64 if self.function.double else self.points[key].dtype
        results = self.function({**self.feed, **self.points, key: moved.astype(dtype)})
        return float(sum(np.vdot(_wide(results[t]), _wide(s)) for t, s in self.seeds.items()))

    # -- PyTorch -------------------------------------------------------------------------------------------------------

    def _torch(self) -> tuple[dict[str, float], dict[str, float], str]:
        """Relative errors against float64 autograd; limits widened to five times PyTorch's own float32 error."""
        if not available():
            return {}, {}, "not installed"
        names = list(self.gradients)
        found = torch_gradients(self.built.primal, self.feed, self.seeds, names)
        if isinstance(found, str):
            return {}, {}, found
        errors = {k: self._error(self.gradients[k], found[k]) for k in names}
        if all(errors[k] <= self.limits[k] for k in names):
            return errors, {}, "compared with float64 autograd"
        single = torch_gradients(self.built.primal, self.feed, self.seeds, names, double=False)
        if isinstance(single, str):
            return errors, {}, "compared with float64 autograd"
        limits = {k: 5 * self._error(single[k], found[k]) for k in names}
        return errors, limits, "compared with float64 autograd; limits follow PyTorch's own float32 error"

    def _error(self, got: np.ndarray, want: np.ndarray) -> float:
        if got.shape != want.shape:
            return float("inf")
        scale = max(float(np.linalg.norm(want)), self.floor)
        return float(np.linalg.norm(_wide(got) - _wide(want))) / scale


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _agreed(slopes: Sequence[float]) -> float:
    """The mean of the two neighbouring steps that agree best."""
    a, b = min(itertools.pairwise(slopes), key=lambda pair: abs(pair[0] - pair[1]))
    return (a + b) / 2
