"""The public rule checker: run every test that a rule must pass on one `Case`.

A case is checked against the primal operator itself, never against a typed-in derivative: numeric directional derivatives
in float64, subsets of operands, static, symbolic and undeclared shapes, runtime optimizations on and off, second order.
The declared factors are checked by perturbation.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from onnx_convgrad import api
from onnx_convgrad.checking.case import (
    FLOATS,
    Case,
    Evaluator,
    Random,
    is_float,
    make_model,
    rand,
    result_names,
    to_float,
)
from onnx_convgrad.checking.notation import check_notation, notation_of
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.frontend.kinds import Transformation
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.runtime import run, session

__all__ = ["Case", "Random", "check", "make_model", "rand"]


def check(case: Case) -> None:
    """Assert that the rule is correct for this case, in every way listed above.

    Args:
        case: The operator, its operands and attributes.
    """
    if not isinstance(case, Case):
        raise ArgumentError(f"case must be an onnx_convgrad.testing.Case, not {case!r:.60}.")
    _Check(case).run()


class _Check:
    """The checks of one case: its model with what it is fed, and the values and cotangents of its gradients."""

    def __init__(self, case: Case) -> None:
        self.case, self.arrays = case, case.arrays
        self.wrt = [i for i, a in enumerate(self.arrays) if is_float(a)] if case.wrt is None else list(case.wrt)
        self.model = make_model(case, self.arrays)
        self.present = {f"x{i}": a for i, a in enumerate(self.arrays) if a is not None}
        self.feed = {i.name: self.present[i.name] for i in self.model.graph.input}
        self.primal, self.exact = _primal(self.model, self.feed)
        named = [(n, j) for j, n in enumerate(result_names(case)) if n and is_float(self.primal[n])]
        self.of = [n for n, j in named if case.of is None or j in case.of]
        generator = np.random.default_rng(len(str(case)))
        shapes = {n: self.primal[n] for n in self.of}
        self.cotangents = {n: generator.uniform(-1, 1, y.shape).astype(y.dtype) for n, y in shapes.items()}
        half = case.dtype is np.float16
        self.tolerance, self.closeness = (max(case.tolerance, 4e-3), 4e-3) if half else (case.tolerance, 2e-5)

    def run(self) -> None:
        case, wrt = self.case, self.wrt
        if self.exact and (notation := notation_of(self.model)) is not None:
            live = session(self.model, optimize=False)
            names = [v.name for v in live.get_outputs()]
            check_notation(notation, lambda fed: dict(zip(names, live.run(names, dict(fed)), strict=True)), self.feed)
        augmented = self._augmented(self.model, wrt)
        result = self._results(augmented)
        for name, value in self.primal.items():
            if self.exact:
                np.testing.assert_array_equal(result[name], value, err_msg="augmenting changed an output")
            else:
                np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5)
        gradients = {i: result[f"x{i}_grad"] for i in wrt}
        for i, gradient in gradients.items():
            like = self.present[f"x{i}"]
            assert gradient.shape == like.shape, f"gradient of x{i} has shape {gradient.shape}"
            assert gradient.dtype == like.dtype, f"gradient of x{i} is {gradient.dtype}"
        self._check_numeric(gradients)
        self._check_adjoint(gradients)
        self._close(self._results(augmented, optimize=True), result, wrt, "runtime optimizations")
        for i in wrt if len(wrt) > 1 else ():
            self._close(self._results(self._augmented(self.model, [i])), result, [i], f"wrt only {i}")
        for shapes in ("symbolic", "absent") if case.dynamic else ():
            part = self._augmented(make_model(case, self.arrays, shapes=shapes), wrt)
            self._close(self._results(part), result, wrt, f"{shapes} shapes")
        if case.order > 1:
            self._check_second_order(augmented)

    def _augmented(self, model: onnx.ModelProto, wrt: Iterable[int]) -> onnx.ModelProto:
        result = _derived(api.augment, model, [f"x{i}" for i in wrt], self.of)
        assert not [n for n in result.graph.node if n.domain == "convgrad"]
        return result

    def _results(self, model: onnx.ModelProto, *, optimize: bool = False) -> dict[str, np.ndarray]:
        return run(model, _fed(model, self.feed, self.cotangents), optimize=optimize)

    def _close(self, got: Mapping[str, Any], want: Mapping[str, Any], which: Iterable[int], what: str) -> None:
        for i in which:
            actual, expected = (side[f"x{i}_grad"].astype(np.float64) for side in (got, want))
            error = float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1e-3)
            assert error <= self.closeness, f"{what}: gradient of x{i} is off by {error:.1e}"

    def _check_numeric(self, gradients: Mapping[int, np.ndarray]) -> None:
        """Compare <gradient, v> with the central difference of <y, cotangent> along random directions v of each operand."""
        # with every floating operand an input
        evaluate = Evaluator(make_model(replace(self.case, constants=()), self.arrays), self.case)
        feed = {**self.feed, **{name: a for name, a in self.present.items() if is_float(a)}}
        slope = _Slope(evaluate, feed, self.cotangents, self.tolerance, "gradient of")
        generator = np.random.default_rng(7)
        for i, gradient in gradients.items():
            for _ in range(2):
                direction = generator.choice([-1.0, 1.0], gradient.shape) * generator.uniform(0.5, 1, gradient.shape)
                slope.compare(f"x{i}", direction, gradient)

    def _check_adjoint(self, gradients: Mapping[int, np.ndarray]) -> None:
        """Check <J v, u> = <v, J' u>: forward and reverse mode are independent walks, and must agree."""
        generator = np.random.default_rng(5)
        tangents = {i: generator.uniform(-1, 1, g.shape).astype(g.dtype) for i, g in gradients.items()}
        pushed = _derived(api.jvp, self.model, [f"x{i}" for i in gradients], self.of)
        result = run(pushed, {**self.feed, **{f"x{i}_tangent": t for i, t in tangents.items()}}, optimize=False)
        left = [np.multiply(result[f"{n}_tangent"], self.cotangents[n], dtype=np.float64) for n in self.of]
        right = [np.multiply(tangents[i], g, dtype=np.float64) for i, g in gradients.items()]
        scale = max(float(np.sqrt(sum(np.sum(t**2) for t in (*left, *right)))), 1e-3)
        error = abs(sum(float(t.sum()) for t in left) - sum(float(t.sum()) for t in right)) / scale
        assert error <= self.tolerance, f"forward and reverse mode disagree by {error:.1e}"

    def _check_second_order(self, augmented: onnx.ModelProto) -> None:
        """Compare the gradient of <gradient, u>, in every operand and cotangent, with a central difference."""
        feed = _fed(augmented, self.feed, self.cotangents)
        constants = {t.name for t in augmented.graph.initializer}
        firsts = [f"x{i}_grad" for i in self.wrt]
        generator = np.random.default_rng(11)
        variables = [n for n, v in feed.items() if v.dtype in FLOATS and n not in constants]
        second = _derived(api.vjp, augmented, variables, firsts)
        gradients = {o: a for o, a in run(augmented, feed, optimize=False).items() if o in firsts}
        directions = {n: generator.uniform(-1, 1, a.shape).astype(a.dtype) for n, a in gradients.items()}
        got = run(second, _fed(second, feed, directions), optimize=False)
        outputs: dict[str, str] = json.loads({p.key: p.value for p in second.metadata_props}[GRADIENTS])
        evaluate = Evaluator(augmented, self.case)
        slope = _Slope(evaluate, feed, directions, 5 * self.tolerance, "second-order gradient of")
        for name in variables:
            slope.compare(name, generator.choice([-1.0, 1.0], feed[name].shape), got[outputs[name]])


def _primal(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], bool]:
    """The primal's outputs, and whether augmenting must keep their bits (the runtime has a kernel for the dtype)."""
    try:
        return run(model, feed, optimize=False), True
    except ExecutionError:
        narrow = {k: v.astype(np.float32) if v.dtype in FLOATS else v for k, v in feed.items()}
        results = run(to_float(model), narrow, optimize=False)
        return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in results.items()}, False


def _derived(transform: Transformation[Any], model: onnx.ModelProto, wrt: list[str], of: list[str]) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a zero gradient is legitimate here
        return transform(model, wrt=wrt, of=of)


def _fed(
    model: onnx.ModelProto, feed: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    names = {i.name for i in model.graph.input}
    everything = {**feed, **{f"{n}_grad": s for n, s in cotangents.items()}}
    missing = {f"{n}_grad" for n in cotangents} - names
    assert all(cotangents[m.removesuffix("_grad")].size == 1 for m in missing), f"no cotangent input for {missing}"
    for name in missing:  # a one-element value has the cotangent 1
        cotangents[name.removesuffix("_grad")][...] = 1
    return {k: v for k, v in everything.items() if k in names}


@dataclass(frozen=True, slots=True)
class _Slope:
    """Slopes of the sum over <result, cotangent> along one operand, by central differences."""

    evaluate: Evaluator
    feed: Mapping[str, np.ndarray]
    cotangents: Mapping[str, np.ndarray]
    tolerance: float
    what: str

    def compare(self, name: str, direction: np.ndarray, gradient: np.ndarray) -> None:
        """Compare <gradient, direction> with the slope along `direction` of the operand `name`."""

        def value(step: float) -> float:
            results = self.evaluate({**self.feed, name: self.feed[name].astype(np.float64) + step * direction})
            pairs = [(results[n].astype(np.float64), s.astype(np.float64)) for n, s in self.cotangents.items()]
            return float(sum(np.vdot(y, s) for y, s in pairs))

        step = self.evaluate.step
        numeric = (value(step) - value(-step)) / (2 * step)
        exact = float(np.vdot(gradient.astype(np.float64), direction))
        scale = max(float(np.linalg.norm(gradient.astype(np.float64))), abs(numeric), 1e-3)
        assert abs(numeric - exact) <= self.tolerance * scale, (
            f"{self.what} {name} along a random direction is {exact:.6g}, numerically {numeric:.6g}"
        )
