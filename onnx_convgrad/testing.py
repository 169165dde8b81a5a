"""The public rule checker: one case record drives every test that a rule must pass.

A case is checked against the primal operator itself, never against a typed-in derivative: numeric directional derivatives
in float64, all subsets of operands, static, symbolic and absent shapes, runtime optimizations on and off, second order.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from onnx_convgrad import api
from onnx_convgrad.emit import CANONICAL_OPSET
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import run, session

__all__ = ["Case", "Random", "check", "make_model", "rand"]

_FLOATS = (np.float16, np.float32, np.float64)
_MULTILINEAR = frozenset(
    {"Conv", "ConvTranspose", "AveragePool", "GlobalAveragePool", "Resize", "MatMul", "Gemm", "Einsum", "Mean"}
)
_NARROW_INSIDE = ("GroupNormalization", "MeanVarianceNormalization")


@dataclass(frozen=True)
class Random:
    """A floating operand to be drawn: uniform in [low, high], the same for the same case."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0


def rand(*shape: int, low: float = -2.0, high: float = 2.0) -> Random:
    """A random operand of the given shape."""
    return Random(shape, low, high)


@dataclass(frozen=True)
class Case:
    """One use of an operator.

    Args:
        op: Operator, or `"domain::Op"`; with `body`, what the case is called, as `"local::Name"`.
        inputs: Operands by position: `rand(...)` for random ones, arrays (integers and booleans become initializers,
            floating arrays graph inputs), `None` for absent ones.
        attributes: Attributes of the node.
        outputs: Number of results, or their names with `""` for absent ones.
        wrt: Positions of the operands to differentiate; every floating one by default.
        of: Positions of the results to differentiate; every floating one by default.
        constants: Positions of floating operands that are to be initializers.
        feed_integers: Integer operands become graph inputs, so that the rule cannot read their values.
        opset: ai.onnx version of the model.
        dtype: Floating type of random operands.
        order: 2 checks the gradient of the gradient too.
        dynamic: Whether to check with symbolic and with absent shapes.
        tolerance: Relative L2 error allowed against the float64 numeric derivative.
        step: Step of the central difference in float64.
        name: For the test id when op and attributes do not tell cases apart.
        body: Several operators in place of one, for rules that need others around them: the lines of an ONNX function in
            textual form, whose operands are `x0`, `x1`, ... and whose results are `y0`, `y1`, ...
    """

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | Sequence[str] = 1
    wrt: Sequence[int] | None = None
    of: Sequence[int] | None = None
    constants: Sequence[int] = ()
    feed_integers: bool = False
    opset: int = CANONICAL_OPSET
    dtype: type = np.float32
    order: int = 2
    dynamic: bool = True
    tolerance: float = 2e-4
    step: float = 1e-5
    name: str = ""
    body: str = ""

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, np.shape(_template(i)))) if i is not None else "-" for i in self.inputs)
        extra = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.GraphProto))
        label = " ".join(filter(None, (self.op, self.name, shapes, extra, np.dtype(self.dtype).name)))
        return label.replace("\n", "") if self.dtype is not np.float32 else label.rsplit(" ", 1)[0]

    @property
    def arrays(self) -> list[np.ndarray | None]:
        """The operands drawn."""
        generator = np.random.default_rng(zlib.crc32(str(self).encode()))
        drawn: list[np.ndarray | None] = []
        for operand in self.inputs:
            if isinstance(operand, Random):
                drawn.append(generator.uniform(operand.low, operand.high, operand.shape).astype(self.dtype))
            else:
                drawn.append(None if operand is None else np.asarray(operand))
        return drawn


def _template(operand: Any) -> Any:
    return np.empty(operand.shape) if isinstance(operand, Random) else operand


def _is_float(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype in _FLOATS


def _result_names(case: Case) -> list[str]:
    if isinstance(case.outputs, int):
        return [f"y{i}" for i in range(case.outputs)]
    return list(case.outputs)


def make_model(case: Case, arrays: Sequence[np.ndarray | None], *, shapes: str = "static") -> onnx.ModelProto:
    """The case as a model of one node. `shapes`: `"static"`, `"symbolic"` or `"absent"`."""
    domain, _, op_type = case.op.rpartition("::")
    inputs, initializers, names = [], [], []
    for i, array in enumerate(arrays):
        if array is None:
            names.append("")
            continue
        names.append(f"x{i}")
        constant = i in case.constants or (not _is_float(array) and not case.feed_integers)
        if constant:
            initializers.append(numpy_helper.from_array(array, f"x{i}"))
            continue
        dims: Sequence[Any] | None = array.shape
        if shapes == "symbolic":
            dims = [f"d{i}_{axis}" for axis in range(array.ndim)]
        inputs.append(
            helper.make_tensor_value_info(
                f"x{i}", helper.np_dtype_to_tensor_dtype(array.dtype), dims if shapes != "absent" else None
            )
        )
    while names and not names[-1]:
        names.pop()
    results = _result_names(case)
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **case.attributes)
    outputs = [helper.make_empty_tensor_value_info(r) for r in results if r]
    graph = helper.make_graph([node], "case", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", case.opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    functions = [_function(case, names)] if case.body else []
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def _function(case: Case, operands: Sequence[str]) -> onnx.FunctionProto:
    domain, _, name = case.op.rpartition("::")
    header = f'<domain: "{domain}", opset_import: ["": {case.opset}]>'
    return onnx.parser.parse_function(
        f"{header} {name} ({', '.join(operands)}) => ({', '.join(_result_names(case))}) {{ {case.body} }}"
    )


def to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that computes in float64: every floating tensor, input and Cast is widened.

    Operators that keep float32 inside, by specification or for want of a kernel, are replaced by their function bodies.
    """
    inlined = inliner.inline_selected_functions(
        model, [("", op) for op in _NARROW_INSIDE], inline_schema_functions=True
    )
    return _to_type(inlined, TensorProto.DOUBLE)


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that computes in float32."""
    return _to_type(model, TensorProto.FLOAT)


def _to_type(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    narrow = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE} - {wanted}
    dtype = helper.tensor_dtype_to_np_dtype(wanted)
    for info in (*result.graph.input, *result.graph.output):
        if info.type.tensor_type.elem_type in narrow:
            info.type.tensor_type.elem_type = wanted
    del result.graph.value_info[:]
    for i, tensor in enumerate(result.graph.initializer):
        if tensor.data_type in narrow:
            wide = numpy_helper.to_array(tensor).astype(dtype)
            result.graph.initializer[i].CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for node in result.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in narrow:
                attribute.i = wanted
            if attribute.name == "value" and attribute.t.data_type in narrow:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(dtype)))
    return result


class Evaluator:
    """A model evaluated as precisely as can be, with the step that suits a central difference of it.

    In float64 by ONNX Runtime; where that lacks a kernel, operators that are linear in each operand run in float32 with
    a step of 1, which is exact for them, and the others in float64 by ONNX's reference evaluator, or, if that lacks the
    operator, in float32: then the case has to say a larger step.
    """

    def __init__(self, model: onnx.ModelProto, case: Case) -> None:
        self.names = [o.name for o in model.graph.output]
        self.step: float = case.step
        self.dtype: type = np.float64
        try:
            self._run: Any = session(to_double(model), optimize=False)
        except ExecutionError:
            if case.op in _MULTILINEAR:
                self.step, self.dtype = 1.0, np.float32
                self._run = session(to_float(model), optimize=False)
            else:
                from onnx.reference import ReferenceEvaluator
                from onnx.reference.op_run import RuntimeImplementationError

                try:
                    self._run = ReferenceEvaluator(to_double(model))
                except RuntimeImplementationError:
                    self.dtype = np.float32
                    self._run = session(to_float(model), optimize=False)

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        cast = {k: np.asarray(v, self.dtype) if v.dtype in _FLOATS else v for k, v in feed.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = self._run.run(self.names, cast)
        return {k: np.asarray(v).astype(np.float64) for k, v in zip(self.names, results, strict=True)}


def check(case: Case) -> None:
    """Assert everything that a rule promises for this case."""
    arrays = case.arrays
    wrt = [i for i, a in enumerate(arrays) if _is_float(a)] if case.wrt is None else list(case.wrt)
    model = make_model(case, arrays)
    present = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    feed = {i.name: present[i.name] for i in model.graph.input}
    primal, exact = _primal(model, feed)
    of = [
        n for j, n in enumerate(_result_names(case)) if n and _is_float(primal[n]) and (case.of is None or j in case.of)
    ]
    generator = np.random.default_rng(len(str(case)))
    seeds = {n: generator.uniform(-1, 1, primal[n].shape).astype(primal[n].dtype) for n in of}
    augmented = _augment(model, wrt, of)
    result = run(augmented, _fed(augmented, feed, seeds), optimize=False)
    for name, value in primal.items():
        if exact:
            np.testing.assert_array_equal(result[name], value, err_msg="augmenting changed an output")
        else:
            np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5)
    gradients = {i: result[f"x{i}_grad"] for i in wrt}
    for i, gradient in gradients.items():
        assert gradient.shape == present[f"x{i}"].shape, f"gradient of x{i} has shape {gradient.shape}"
        assert gradient.dtype == present[f"x{i}"].dtype, f"gradient of x{i} is {gradient.dtype}"
    _check_numeric(case, feed, seeds, gradients, arrays)
    _check_adjoint(case, model, feed, seeds, gradients, of)
    _close(run(augmented, _fed(augmented, feed, seeds)), result, gradients, case, "runtime optimizations")
    for subset in itertools.combinations(wrt, 1) if len(wrt) > 1 else ():
        part = _augment(model, subset, of)
        _close(run(part, _fed(part, feed, seeds), optimize=False), result, subset, case, f"wrt only {subset}")
    if case.dynamic:
        for shapes in ("symbolic", "absent"):
            loose = make_model(case, arrays, shapes=shapes)
            part = _augment(loose, wrt, of)
            _close(run(part, _fed(part, feed, seeds), optimize=False), result, wrt, case, f"{shapes} shapes")
    if case.order > 1:
        _check_second_order(case, augmented, _fed(augmented, feed, seeds), wrt)


def _primal(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], bool]:
    """The primal's outputs, and whether they are the bits to expect (the runtime has the kernel for the dtype)."""
    try:
        return run(model, feed, optimize=False), True
    except ExecutionError:
        narrow = {k: v.astype(np.float32) if v.dtype in _FLOATS else v for k, v in feed.items()}
        results = run(to_float(model), narrow, optimize=False)
        return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in results.items()}, False


def _augment(model: onnx.ModelProto, wrt: Sequence[int], of: Sequence[str]) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the gradient is zero" is a legitimate answer here
        result = api.augment(model, wrt=[f"x{i}" for i in wrt], of=list(of))
    assert not [n for n in result.graph.node if n.domain == "convgrad"]
    return result


def _fed(model: onnx.ModelProto, feed: Mapping[str, Any], seeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {i.name for i in model.graph.input}
    everything = {**feed, **{f"{n}_grad": s for n, s in seeds.items()}}
    missing = {f"{n}_grad" for n in seeds} - names
    assert all(seeds[m.removesuffix("_grad")].size == 1 for m in missing), f"no seed input for {missing}"
    for name in missing:  # a one-element target is seeded with 1
        seeds[name.removesuffix("_grad")][...] = 1
    return {k: v for k, v in everything.items() if k in names}


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    scale = float(np.linalg.norm(want.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - want.astype(np.float64))) / max(scale, 1e-3)


def _tolerance(case: Case) -> float:
    return max(case.tolerance, 4e-3) if case.dtype is np.float16 else case.tolerance


def _close(got: Mapping[str, Any], want: Mapping[str, Any], which: Any, case: Case, what: str) -> None:
    for i in which:
        error = _relative(got[f"x{i}_grad"], want[f"x{i}_grad"])
        limit = 4e-3 if case.dtype is np.float16 else 2e-5
        assert error <= limit, f"{what}: gradient of x{i} is off by {error:.1e}"


def _check_numeric(
    case: Case,
    feed: Mapping[str, np.ndarray],
    seeds: Mapping[str, np.ndarray],
    gradients: Mapping[int, np.ndarray],
    arrays: Sequence[np.ndarray | None],
) -> None:
    """<gradient, v> against the central difference of <y, seed> along random directions v, per operand."""
    loose = make_model(replace(case, constants=()), arrays)  # every floating operand can be moved
    evaluate = Evaluator(loose, case)
    feed = {**feed, **{f"x{i}": a for i, a in enumerate(arrays) if a is not None and _is_float(a)}}
    generator = np.random.default_rng(7)
    for i, gradient in gradients.items():
        array = arrays[i]
        assert array is not None
        for _ in range(2):
            direction = generator.choice([-1.0, 1.0], array.shape) * generator.uniform(0.5, 1, array.shape)

            def value(step: float, i: int = i, direction: np.ndarray = direction) -> float:
                moved = arrays[i].astype(np.float64) + step * direction  # type: ignore[union-attr]
                results = evaluate({**feed, f"x{i}": moved})
                return float(
                    sum(np.vdot(results[n].astype(np.float64), s.astype(np.float64)) for n, s in seeds.items())
                )

            numeric = (value(evaluate.step) - value(-evaluate.step)) / (2 * evaluate.step)
            exact = float(np.vdot(gradient.astype(np.float64), direction))
            scale = max(float(np.linalg.norm(gradient.astype(np.float64))), abs(numeric), 1e-3)
            assert abs(numeric - exact) <= _tolerance(case) * scale, (
                f"gradient of x{i} along a random direction is {exact:.6g}, numerically {numeric:.6g}"
            )


def _check_adjoint(
    case: Case,
    model: onnx.ModelProto,
    feed: Mapping[str, np.ndarray],
    seeds: Mapping[str, np.ndarray],
    gradients: Mapping[int, np.ndarray],
    of: Sequence[str],
) -> None:
    """<J v, u> = <v, J' u>: forward and reverse mode are two walks, and must agree."""
    generator = np.random.default_rng(5)
    tangents = {i: generator.uniform(-1, 1, g.shape).astype(g.dtype) for i, g in gradients.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pushed = api.jvp(model, wrt=[f"x{i}" for i in gradients], of=list(of))
    result = run(pushed, {**feed, **{f"x{i}_tangent": t for i, t in tangents.items()}}, optimize=False)
    left = [np.multiply(result[f"{n}_tangent"], seeds[n], dtype=np.float64) for n in of]
    right = [np.multiply(tangents[i], g, dtype=np.float64) for i, g in gradients.items()]
    scale = max(float(np.sqrt(sum(np.sum(t**2) for t in (*left, *right)))), 1e-3)
    error = abs(sum(float(t.sum()) for t in left) - sum(float(t.sum()) for t in right)) / scale
    assert error <= _tolerance(case), f"forward and reverse mode disagree by {error:.1e}"


def _check_second_order(
    case: Case, augmented: onnx.ModelProto, feed: Mapping[str, np.ndarray], wrt: Sequence[int]
) -> None:
    """The gradient of <gradient, u>, in every operand and in the seeds, against a central difference of the first."""
    constants = {t.name for t in augmented.graph.initializer}
    firsts = [f"x{i}_grad" for i in wrt]
    generator = np.random.default_rng(11)
    variables = [n for n, v in feed.items() if v.dtype in _FLOATS and n not in constants]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        second = api.vjp(augmented, wrt=variables, of=firsts)
    shapes = {o: a for o, a in run(augmented, feed, optimize=False).items() if o in firsts}
    directions = {n: generator.uniform(-1, 1, a.shape).astype(a.dtype) for n, a in shapes.items()}
    names = {i.name for i in second.graph.input}
    extra = {}
    for first, u in directions.items():
        if f"{first}_grad" in names:
            extra[f"{first}_grad"] = u
        else:
            u[...] = 1
    got = run(second, {**{k: v for k, v in feed.items() if k in names}, **extra}, optimize=False)
    results = {name: got[f] for name, f in _gradient_map(second).items()}
    evaluate = Evaluator(augmented, case)
    for name in variables:
        direction = generator.choice([-1.0, 1.0], feed[name].shape)

        def value(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            moved = evaluate({**feed, name: feed[name].astype(np.float64) + step * direction})
            return float(sum(np.vdot(moved[n].astype(np.float64), u.astype(np.float64)) for n, u in directions.items()))

        numeric = (value(evaluate.step) - value(-evaluate.step)) / (2 * evaluate.step)
        exact = float(np.vdot(results[name].astype(np.float64), direction))
        scale = max(float(np.linalg.norm(results[name].astype(np.float64))), abs(numeric), 1e-3)
        limit = 5 * _tolerance(case) * scale
        assert abs(numeric - exact) <= limit, f"second order, {name}: {exact:.6g}, numerically {numeric:.6g}"


def _gradient_map(model: onnx.ModelProto) -> dict[str, str]:
    import json

    props = {p.key: p.value for p in model.metadata_props}
    result: dict[str, str] = json.loads(props[api.GRADIENTS_KEY])
    return result
