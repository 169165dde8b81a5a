"""Compare the gradients of an augmented model with numeric derivatives and PyTorch's, or those of a provider with the CPU's.

For each value x and a random direction v, <gradient, v> is compared with the central difference along v of
L = sum <output, cotangent>. L is evaluated in float64 where possible, so that small steps, which cross few kinks of Relu
or MaxPool, are precise. The error is relative to |gradient|, or to 1e-3 of the largest gradient where that is more, since
float32 does not resolve smaller ones. Where a float32 gradient fails, the same graph is checked in float64 (see `rounding`):
the verdict is `rounding` only if the graph is correct there and the difference is within the estimated rounding error of
float32. Where the difference is below the rounding error of L in float64, the verdict is `undetermined`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.progress import announce
from onnx_convgrad.checking.float64_model import Primal, primal_function
from onnx_convgrad.checking.numeric_derivative import Derivative, Difference, wide
from onnx_convgrad.checking.random_inputs import working_feed
from onnx_convgrad.checking.report import CheckReport, ProviderReport, ProviderRow, Row
from onnx_convgrad.checking.rounding import Float64Gradients
from onnx_convgrad.errors import ExecutionError, ModelError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.selection import resolve_of
from onnx_convgrad.ir.constants import RANDOM_SOURCES
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import DERIVATIVE_INPUTS
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.runtime import session

Arrays = Mapping[str, np.ndarray]

_LIMITS = {ir.DataType.DOUBLE: 1e-5, ir.DataType.FLOAT16: 3e-2, ir.DataType.BFLOAT16: 1e-1}
_LIMIT = 1e-3
_KINKS = 1e-2
_FLOAT32_LIMIT = 3e-2
_FLOOR = 1e-3
_LIMIT_OF_PROTO = 2**31


def verify_numerically(
    built: Built, model: AnyModel | None = None, *, feed: Arrays | None = None, seed: int = 0, samples: int = 1
) -> CheckReport:
    """Compare the gradients of a built model with numeric ones, and with PyTorch's if it is installed.

    Args:
        built: The model with gradients. It must not pass derivatives straight through quantizers and detached values: the
            numeric derivative of the former is that of a step function, and the latter vary, too.
        model: The model that it was built of, which tells who is to blame if the runtime refuses it.
        feed: The inputs; by default random ones that it accepts, for which free sizes are found by trial.
        seed: Random seed: inputs, cotangents and directions.
        samples: Random directions per value.

    Raises:
        ModelError: The model runs on no random input that was tried, or it holds more than 2 GB.
        ExecutionError: The runtime refuses the result, or fails.
    """
    opened = _opened(built, model)
    feed, inputs, cotangents, generator = _draw_inputs(built, seed, feed)
    announce("running the gradients")
    gradients = run_gradients(built, opened, inputs)
    comparison = _Comparison(built, feed, inputs, cotangents, gradients, generator, samples)
    return comparison.run(seed)


def compare_with_cpu(built: Built, provider: str, *, feed: Arrays | None = None, seed: int = 0) -> ProviderReport:
    """Run the gradients on a provider, and on the CPU without graph optimizations; compare them.

    An error is relative to the norm of the gradient, or to 1e-3 of the largest norm where that is more.

    Args:
        built: A model with gradients.
        provider: A name as for `runtime.session`.
        feed: The inputs; by default random ones that the model accepts.
        seed: Seed of the random inputs and cotangents.

    Raises:
        ModelError: The model draws random numbers, holds more than 2 GB, or runs on no input that was tried.
        ExecutionError: The provider is missing, or refuses the graph; or the CPU fails.
    """
    opened = session(built.model, providers=[provider])
    feed, inputs, _, _ = _draw_inputs(built, seed, feed)
    announce("running on the CPU")
    want = run_gradients(built, session(built.model, providers=["cpu"], optimize=False), inputs)
    announce(f"running on {provider}")
    got, failure = want, ""
    try:
        got = run_gradients(built, opened, inputs)
    except ExecutionError as problem:
        failure = problem.message
    (norms, floor), limits = _norms_of(want), _limits_of_errors(built)
    rows = []
    for name, gradient in want.items():
        error = float("inf")
        if not failure and got[name].shape == gradient.shape and np.isfinite(wide(got[name])).all():
            error = float(np.linalg.norm(wide(got[name]) - wide(gradient))) / max(norms[name], floor)
        rows.append(ProviderRow(name, gradient.shape, norms[name], error, limits[name]))
    return ProviderReport(provider, tuple(rows), {k: v.shape for k, v in feed.items()}, seed, failure)


def _opened(built: Built, model: AnyModel | None) -> Any:
    """A session of the result; if the runtime refuses it, the error says whether it takes the model itself."""
    _check_size(built)
    try:
        return session(built.model)
    except ExecutionError as refusal:
        if model is None:
            raise
        try:
            session(model.source if isinstance(model, Model) else model)
        except ExecutionError:
            raise refusal from None
        raise ExecutionError(
            f"ONNX Runtime loads the model but not the result. {refusal.message}",
            hint="The result is valid ONNX: try another version of ONNX Runtime, or less optimization"
            " (graph_optimization_level of its SessionOptions), and report it.",
        ) from refusal


def _draw_inputs(built: Built, seed: int, feed: Arrays | None) -> tuple[Arrays, Arrays, Arrays, np.random.Generator]:
    """Draw inputs that the model accepts, if `feed` gives none, and cotangents of the differentiated values.

    Returns:
        The inputs of the model, those of the gradients, the cotangent of each differentiated value, and the generator that
        drew these.
    """
    primal = built.primal
    _check_size(built)
    _refuse_random(primal)
    announce("finding inputs")
    targets = [v.name or "" for v in resolve_of(primal.graph, built.options.of)]
    function = primal_function(primal, targets, double=False)
    if feed is None:
        feed, outputs = working_feed(list(primal.graph.inputs), function, seed)
    else:
        outputs = function(feed)
    generator = np.random.default_rng(seed + 1)
    names = json.loads(built.model.metadata_props[DERIVATIVE_INPUTS])
    cotangents = {
        t: generator.standard_normal(y.shape).astype(y.dtype) if t in names else np.ones_like(y)
        for t, y in outputs.items()
    }
    inputs = {**feed, **{names[t]: s for t, s in cotangents.items() if t in names}}
    return feed, inputs, cotangents, generator


def _check_size(built: Built) -> None:
    size = sum(v.const_value.nbytes for v in built.model.graph.initializers.values() if v.const_value is not None)
    if size >= _LIMIT_OF_PROTO:
        raise ModelError("A model of more than 2 GB cannot be checked.", hint="Check a smaller variant of it.")


def _refuse_random(primal: ir.Model) -> None:
    for node in primal.graph:
        flag = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
        drops = flag is not None and flag.const_value is not None and bool(flag.const_value.numpy().all())
        if drops or node.op_type in RANDOM_SOURCES:
            raise ModelError(
                f"Node {node.name!r} ({node.op_type}) draws random numbers, so two runs cannot be compared.",
                hint="Check without --training." if drops else "",
            )


def run_gradients(built: Built, opened: Any, feed: Arrays) -> dict[str, np.ndarray]:
    """Run a session of the gradients; value -> gradient."""
    names = list(built.gradients.values())
    wanted = {i.name for i in opened.get_inputs()}
    try:
        results = opened.run(names, {k: v for k, v in feed.items() if k in wanted})
    except Exception as problem:
        raise ExecutionError(f"ONNX Runtime failed to run the gradients: {problem}") from problem
    return dict(zip(built.gradients, results, strict=True))


def _limits_of_errors(built: Built) -> dict[str, float]:
    """Value -> the largest relative error of its gradient, which depends on the type."""
    values = named_values(built.primal.graph)
    return {name: _LIMITS.get(values[name].dtype or ir.DataType.FLOAT, _LIMIT) for name in built.gradients}


def _norms_of(gradients: Arrays) -> tuple[dict[str, float], float]:
    """The norms of gradients, and the smallest one that errors are relative to."""
    norms = {name: float(np.linalg.norm(wide(g))) for name, g in gradients.items()}
    return norms, max([1e-12, *(_FLOOR * norm for norm in norms.values() if math.isfinite(norm))])


@dataclass
class _Comparison:
    """The references for each gradient, at one set of inputs and cotangents."""

    built: Built
    feed: Arrays
    inputs: Arrays
    cotangents: Arrays
    gradients: Arrays
    generator: np.random.Generator
    samples: int
    reason: str = ""

    def __post_init__(self) -> None:
        self.points = self._points()
        self.norms, self.floor = _norms_of(self.gradients)
        self.limits = _limits_of_errors(self.built)
        self.function = self._function()
        self.derivative = Derivative(self.function, self.feed, self.points, self.cotangents)

    def _points(self) -> dict[str, np.ndarray]:
        """The input for each differentiated value; zeros for the shift of an intermediate one."""
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
        """The primal in float64, or in float32 where that cannot be built or run."""
        announce("preparing the model in float64")
        primal, targets = self.built.primal, list(self.cotangents)
        moved = list(self.gradients)
        try:
            function = primal_function(primal, targets, moved, double=True)
            if all(np.isfinite(v).all() for v in function({**self.feed, **self.points}).values()):
                return function
            self.reason = "its results are not finite there"
        except Exception as problem:  # noqa: BLE001 - whatever the reason, float32 is the second choice
            self.reason = f"{problem}".strip().partition("\n")[0].rstrip(".")[:200]
            announce(f"no float64 evaluation: {problem}")
        return primal_function(primal, targets, moved, double=False)

    def run(self, seed: int) -> CheckReport:
        announce("computing PyTorch's gradients")
        torch_errors, torch_limits, note = self._torch()
        rows = []
        for count, (name, output) in enumerate(self.built.gradients.items(), 1):
            announce(f"numeric derivative {count}/{len(self.gradients)}: {name}")
            rows.append(self._row(name, output, torch_errors.get(name), torch_limits.get(name)))
        shapes = {k: v.shape for k, v in self.feed.items()}
        precision = "float64" if self.function.double else "float32"
        return CheckReport(tuple(rows), shapes, precision, note, seed, self.reason)

    def _row(self, name: str, output: str, torch: float | None, torch_limit: float | None) -> Row:
        limit = max(self.limits[name], torch_limit or 0.0)
        numeric_limit = limit if self.function.double else max(limit, _FLOAT32_LIMIT)
        if torch is not None and torch <= limit:  # the rest of a numeric error comes from kinks that the step crosses
            numeric_limit = max(numeric_limit, _KINKS)
        gradient = self.gradients[name]
        directions = [self.generator.standard_normal(gradient.shape) for _ in range(self.samples)]
        differences = [self._compared(name, gradient, direction, numeric_limit) for direction in directions]
        numeric = max(d.error for d in differences)
        within = bool(np.isfinite(gradient).all()) and (torch is None or torch <= limit)
        ok, rounding, undetermined = within and numeric <= numeric_limit, None, False
        if within and not ok:
            worst = max(self._without_rounding(name, differences, numeric_limit), key=lambda d: d.error - d.noise)
            ok = worst.error - worst.noise <= numeric_limit
            undetermined = ok and worst.error > numeric_limit and torch is None
            rounding = worst.error if ok and worst.error <= numeric_limit else None
        shape, norm = gradient.shape, self.norms[name]
        return Row(name, output, shape, norm, numeric, numeric_limit, torch, limit, ok, rounding, undetermined)

    def _compared(self, name: str, gradient: np.ndarray, direction: np.ndarray, limit: float) -> Difference:
        scale = max(float(np.linalg.norm(wide(gradient))), self.floor)
        return self.derivative.compared(name, gradient, direction, scale, limit)

    def _without_rounding(self, name: str, differences: Sequence[Difference], limit: float) -> Sequence[Difference]:
        """The differences of the graph in float64, if rounding explains its distance from float32."""
        double = self._double if self.function.double else None
        if double is None or np.linalg.norm(wide(self.gradients[name]) - double[name]) > double.resolution(name):
            return differences
        return [self._compared(name, double[name], d.direction, limit) for d in differences]

    @cached_property
    def _double(self) -> Float64Gradients | None:
        announce("running the gradients in float64")
        try:
            return Float64Gradients(self.built, self.inputs)
        except Exception as problem:  # noqa: BLE001 - then the first result stands
            announce(f"no float64 gradients: {problem}")
            return None

    # -- PyTorch -------------------------------------------------------------------------------------------------------

    def _torch(self) -> tuple[dict[str, float], dict[str, float], str]:
        """Relative errors against float64 autograd; limits widened to five times PyTorch's own float32 error."""
        if find_spec("torch") is None:
            return {}, {}, "not installed"
        from onnx_convgrad.checking.torch_gradients import torch_gradients

        names = list(self.gradients)
        exact = torch_gradients(self.built.primal, self.feed, self.cotangents, names)
        if isinstance(exact, str):
            return {}, {}, exact
        names = [k for k in names if np.isfinite(exact[k]).all() or not np.isfinite(self.gradients[k]).all()]
        errors = {k: self._error(self.gradients[k], exact[k]) for k in names}
        if all(errors[k] <= self.limits[k] for k in names):
            return errors, {}, "compared with float64 autograd"
        single = torch_gradients(self.built.primal, self.feed, self.cotangents, names, double=False)
        if isinstance(single, str):
            return errors, {}, "compared with float64 autograd"
        limits = {k: 5 * self._error(single[k], exact[k]) for k in names}
        return errors, limits, "compared with float64 autograd; limits follow PyTorch's own float32 error"

    def _error(self, got: np.ndarray, want: np.ndarray) -> float:
        if got.shape != want.shape:
            return float("inf")
        scale = max(float(np.linalg.norm(want)), self.floor)
        return float(np.linalg.norm(wide(got) - wide(want))) / scale
