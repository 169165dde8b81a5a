"""The public rule checker: run every test that a rule must pass on one `Case`.

A case is checked against the primal operator itself, never against a typed-in derivative: numeric directional derivatives
in float64, subsets of operands, static, symbolic and undeclared shapes, runtime optimizations on and off, second order.
The declared factors are checked by perturbation.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    arrays = case.arrays
    wrt = [i for i, a in enumerate(arrays) if is_float(a)] if case.wrt is None else list(case.wrt)
    model = make_model(case, arrays)
    present = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    feed = {i.name: present[i.name] for i in model.graph.input}
    primal, exact = _primal(model, feed)
    if exact and (notation := notation_of(model)) is not None:
        live = session(model, optimize=False)
        names = [v.name for v in live.get_outputs()]
        check_notation(notation, lambda fed: dict(zip(names, live.run(names, dict(fed)), strict=True)), feed)
    of = [
        n for j, n in enumerate(result_names(case)) if n and is_float(primal[n]) and (case.of is None or j in case.of)
    ]
    generator = np.random.default_rng(len(str(case)))
    cotangents = {n: generator.uniform(-1, 1, primal[n].shape).astype(primal[n].dtype) for n in of}
    augmented = _augment(model, wrt, of)
    result = run(augmented, _fed(augmented, feed, cotangents), optimize=False)
    for name, value in primal.items():
        if exact:
            np.testing.assert_array_equal(result[name], value, err_msg="augmenting changed an output")
        else:
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5)
    gradients = {i: result[f"x{i}_grad"] for i in wrt}
    for i, gradient in gradients.items():
        assert gradient.shape == present[f"x{i}"].shape, f"gradient of x{i} has shape {gradient.shape}"
        assert gradient.dtype == present[f"x{i}"].dtype, f"gradient of x{i} is {gradient.dtype}"
    _check_numeric(case, feed, cotangents, gradients, arrays)
    _check_adjoint(case, model, feed, cotangents, gradients, of)
    _close(run(augmented, _fed(augmented, feed, cotangents)), result, gradients, case, "runtime optimizations")
    for subset in itertools.combinations(wrt, 1) if len(wrt) > 1 else ():
        part = _augment(model, subset, of)
        _close(run(part, _fed(part, feed, cotangents), optimize=False), result, subset, case, f"wrt only {subset}")
    if case.dynamic:
        for shapes in ("symbolic", "absent"):
            loose = make_model(case, arrays, shapes=shapes)
            part = _augment(loose, wrt, of)
            _close(run(part, _fed(part, feed, cotangents), optimize=False), result, wrt, case, f"{shapes} shapes")
    if case.order > 1:
        _check_second_order(case, augmented, _fed(augmented, feed, cotangents), wrt)


def _primal(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], bool]:
    """The primal's outputs, and whether augmenting must keep their bits (the runtime has a kernel for the dtype)."""
    try:
        return run(model, feed, optimize=False), True
    except ExecutionError:
        narrow = {k: v.astype(np.float32) if v.dtype in FLOATS else v for k, v in feed.items()}
        results = run(to_float(model), narrow, optimize=False)
        return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in results.items()}, False


def _augment(model: onnx.ModelProto, wrt: Sequence[int], of: Sequence[str]) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a zero gradient is legitimate here
        result = api.augment(model, wrt=[f"x{i}" for i in wrt], of=list(of))
    assert not [n for n in result.graph.node if n.domain == "convgrad"]
    return result


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


def _tolerance(case: Case) -> float:
    return max(case.tolerance, 4e-3) if case.dtype is np.float16 else case.tolerance


def _close(got: Mapping[str, Any], want: Mapping[str, Any], which: Any, case: Case, what: str) -> None:
    limit = 4e-3 if case.dtype is np.float16 else 2e-5
    for i in which:
        actual, expected = (side[f"x{i}_grad"].astype(np.float64) for side in (got, want))
        error = float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1e-3)
        assert error <= limit, f"{what}: gradient of x{i} is off by {error:.1e}"


def _check_numeric(
    case: Case,
    feed: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    gradients: Mapping[int, np.ndarray],
    arrays: Sequence[np.ndarray | None],
) -> None:
    """Compare <gradient, v> with the central difference of <y, cotangent> along random directions v of each operand."""
    evaluate = Evaluator(make_model(replace(case, constants=()), arrays), case)  # with every floating operand an input
    feed = {**feed, **{f"x{i}": a for i, a in enumerate(arrays) if a is not None and is_float(a)}}
    generator = np.random.default_rng(7)
    for i, gradient in gradients.items():
        for _ in range(2):
            direction = generator.choice([-1.0, 1.0], gradient.shape) * generator.uniform(0.5, 1, gradient.shape)
            _compare_slope(evaluate, feed, f"x{i}", direction, gradient, cotangents, _tolerance(case), "gradient of")


def _compare_slope(
    evaluate: Evaluator,
    feed: Mapping[str, np.ndarray],
    name: str,
    direction: np.ndarray,
    gradient: np.ndarray,
    cotangents: Mapping[str, np.ndarray],
    tolerance: float,
    what: str,
) -> None:
    """Compare <gradient, direction> with the central difference of sum <result, cotangent> along `direction` of `name`."""

    def value(step: float) -> float:
        results = evaluate({**feed, name: feed[name].astype(np.float64) + step * direction})
        return float(sum(np.vdot(results[n].astype(np.float64), s.astype(np.float64)) for n, s in cotangents.items()))

    numeric = (value(evaluate.step) - value(-evaluate.step)) / (2 * evaluate.step)
    exact = float(np.vdot(gradient.astype(np.float64), direction))
    scale = max(float(np.linalg.norm(gradient.astype(np.float64))), abs(numeric), 1e-3)
    assert abs(numeric - exact) <= tolerance * scale, (
        f"{what} {name} along a random direction is {exact:.6g}, numerically {numeric:.6g}"
    )


def _check_adjoint(
    case: Case,
    model: onnx.ModelProto,
    feed: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    gradients: Mapping[int, np.ndarray],
    of: Sequence[str],
) -> None:
    """Check <J v, u> = <v, J' u>: forward and reverse mode are independent walks, and must agree."""
    generator = np.random.default_rng(5)
    tangents = {i: generator.uniform(-1, 1, g.shape).astype(g.dtype) for i, g in gradients.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pushed = api.jvp(model, wrt=[f"x{i}" for i in gradients], of=list(of))
    result = run(pushed, {**feed, **{f"x{i}_tangent": t for i, t in tangents.items()}}, optimize=False)
    left = [np.multiply(result[f"{n}_tangent"], cotangents[n], dtype=np.float64) for n in of]
    right = [np.multiply(tangents[i], g, dtype=np.float64) for i, g in gradients.items()]
    scale = max(float(np.sqrt(sum(np.sum(t**2) for t in (*left, *right)))), 1e-3)
    error = abs(sum(float(t.sum()) for t in left) - sum(float(t.sum()) for t in right)) / scale
    assert error <= _tolerance(case), f"forward and reverse mode disagree by {error:.1e}"


def _check_second_order(
    case: Case, augmented: onnx.ModelProto, feed: Mapping[str, np.ndarray], wrt: Sequence[int]
) -> None:
    """Compare the gradient of <gradient, u>, in every operand and cotangent, with a central difference of the gradient."""
    constants = {t.name for t in augmented.graph.initializer}
    firsts = [f"x{i}_grad" for i in wrt]
    generator = np.random.default_rng(11)
    variables = [n for n, v in feed.items() if v.dtype in FLOATS and n not in constants]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        second = api.vjp(augmented, wrt=variables, of=firsts)
    gradients = {o: a for o, a in run(augmented, feed, optimize=False).items() if o in firsts}
    directions = {n: generator.uniform(-1, 1, a.shape).astype(a.dtype) for n, a in gradients.items()}
    names = {i.name for i in second.graph.input}
    extra = {}
    for first, u in directions.items():
        if f"{first}_grad" in names:
            extra[f"{first}_grad"] = u
        else:
            u[...] = 1
    got = run(second, {**{k: v for k, v in feed.items() if k in names}, **extra}, optimize=False)
    outputs: dict[str, str] = json.loads({p.key: p.value for p in second.metadata_props}[GRADIENTS])
    results = {name: got[output] for name, output in outputs.items()}
    evaluate = Evaluator(augmented, case)
    for name in variables:
        direction = generator.choice([-1.0, 1.0], feed[name].shape)
        what = "second-order gradient of"
        _compare_slope(evaluate, feed, name, direction, results[name], directions, 5 * _tolerance(case), what)
