"""Operators of unknown rank in a branch of an If: every case of the other modules, behind a Reshape to a fed shape.

The gradients are those of the operator alone, or the operator is refused with the reason; nothing crashes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.checking.case import is_float, result_names
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # a part of the operators has the derivative zero

Arrays = dict[str, np.ndarray]


def _cases() -> Iterator[Case]:
    """The cases of all rules."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        module = importlib.import_module(f"tests.rules.{path.stem}")
        for test in (getattr(module, name, None) for name in ("test_rule", "test_loss")):
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "parametrize" and mark.args[0] == "case":
                    yield from mark.args[1]


def _usable(case: Case) -> bool:
    """Whether there is a Reshape with `allowzero` at the opset of the case, and gradients do not need sizes."""
    return case.opset >= 14 and case.dynamic and bool(_sources(case))


def _sources(case: Case) -> list[str]:
    positions = range(len(case.inputs)) if case.wrt is None else case.wrt
    return [f"x{i}" for i in positions if i not in case.constants and is_float(case.arrays[i])]


EVERY = [case for case in _cases() if _usable(case)]
ONE_EACH = list({case.op: case for case in reversed(EVERY)}.values())


def _typed(name: str, array: np.ndarray, shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


def hidden(plain: onnx.ModelProto, feed: Mapping[str, np.ndarray], results: Arrays) -> tuple[onnx.ModelProto, Arrays]:
    """The node of a model in a branch of an If, with operands and results of unknown rank; and what it is fed."""
    (node,) = plain.graph.node
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[:] = [f"then_{name}" if name else "" for name in node.output]
    inner.input[:] = [f"hidden_{name}" if name in feed else name for name in node.input]
    shapes = {f"{k}_shape": np.array(v.shape, np.int64) for k, v in {**feed, **results}.items()}
    reshapes = [helper.make_node("Reshape", [k, f"{k}_shape"], [f"hidden_{k}"], allowzero=1) for k in feed]
    zeros = [numpy_helper.from_array(np.zeros((), v.dtype), f"{k}_zero") for k, v in results.items()]
    others = [helper.make_node("Expand", [f"{k}_zero", f"{k}_shape"], [f"else_{k}"]) for k in results]
    branches = {
        f"{way}_branch": helper.make_graph(nodes, way, [], [_typed(f"{way}_{k}", v, None) for k, v in results.items()])
        for way, nodes in (("then", [*reshapes, inner]), ("else", others))
    }
    inputs = [
        *(_typed(k, v, list(v.shape)) for k, v in feed.items()),
        *(helper.make_tensor_value_info(k, TensorProto.INT64, [None]) for k in shapes),
        helper.make_tensor_value_info("taken", TensorProto.BOOL, []),
    ]
    outputs = [_typed(k, v, None) for k, v in results.items()]
    nodes = [helper.make_node("If", ["taken"], list(results), **branches)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [*plain.graph.initializer, *zeros])
    model = helper.make_model(graph, opset_imports=plain.opset_import, ir_version=10, functions=plain.functions)
    return model, {**feed, **shapes, "taken": np.array(True)}


def _built(case: Case) -> tuple[onnx.ModelProto, Arrays, Arrays]:
    """The model of a case, its feed and its results."""
    arrays = case.arrays
    plain = make_model(case, arrays)
    feed = {i.name: array for i in plain.graph.input if (array := arrays[int(i.name[1:])]) is not None}
    return plain, feed, run(plain, feed)


def _targets(case: Case, results: Arrays) -> list[str]:
    names = result_names(case)
    positions = range(len(names)) if case.of is None else case.of
    return [names[i] for i in positions if names[i] and results[names[i]].dtype.kind == "f"]


def _gradients(model: onnx.ModelProto, feed: Arrays, results: Arrays, case: Case) -> Arrays:
    sources = _sources(case)
    augmented = og.augment(model, wrt=sources, of=_targets(case, results))
    seeds = {f"{k}_grad": _seed(v) for k, v in results.items()}
    found = run(augmented, {i.name: {**seeds, **feed}[i.name] for i in augmented.graph.input})
    return {name: found[f"{name}_grad"] for name in sources}


def _seed(y: np.ndarray) -> np.ndarray:
    """Numbers near one; one itself for a single element, which needs no seed where its rank is known."""
    return np.linspace(1, 1.5, y.size).astype(y.dtype).reshape(y.shape)


_REASONS = ("is not known", "is unknown", "random result cannot be kept")


def _compare(case: Case) -> None:
    try:
        plain, feed, results = _built(case)
    except og.errors.ExecutionError:  # it has no kernel for the type
        return
    want = _gradients(plain, feed, results, case)
    model, more = hidden(plain, feed, results)
    try:
        run(model, more)
    except og.errors.ExecutionError:  # ONNX Runtime needs the rank itself
        return
    try:
        got = _gradients(model, more, results, case)
    except og.errors.DifferentiationError as refusal:
        if any(not any(text in p.reason for text in _REASONS) for p in refusal.problems):
            raise
        return
    tolerance = 2e-2 if case.dtype == np.float16 else 1e-3
    for name, array in want.items():
        np.testing.assert_allclose(
            got[name], array, rtol=tolerance, atol=tolerance * (1 + np.abs(array).max(initial=0))
        )


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_a_branch_of_unknown_ranks(case: Case) -> None:
    _compare(case)


@pytest.mark.slow
def test_every_case_in_a_branch_of_unknown_ranks() -> None:
    for case in EVERY:
        _compare(case)


WAYS: dict[str, Callable[[onnx.ModelProto, list[str], str], Any]] = {
    "jvp": lambda m, wrt, of: og.jvp(m, wrt=wrt, of=of),
    "vjp": lambda m, wrt, of: og.vjp(m, wrt=wrt, of=of),
    "hvp": lambda m, wrt, of: og.hvp(m, wrt=wrt, of=of),
    "per sample": lambda m, wrt, of: og.augment(m, wrt=wrt, of=of, per_sample=True),
    "explain": lambda m, wrt, of: og.explain(m, wrt=wrt, of=of),
    "jacobian": lambda m, wrt, of: og.jacobian(m, wrt=wrt[0], of=of),
    "vmap": lambda m, _wrt, _of: og.vmap(m),
    "share": lambda m, wrt, of: og.augment(m, wrt=wrt, of=of, memory=0.8),
    "recompute": lambda m, wrt, of: og.augment(m, wrt=wrt, of=of, memory=og.Memory(recompute="auto")),
    "training": lambda m, _wrt, of: og.build_training(m, loss={of: "mse"}, optimizer="sgd"),
    "cuda": lambda m, wrt, of: og.augment(m, wrt=wrt, of=of, target="cuda"),
    "webgpu": lambda m, wrt, of: og.augment(m, wrt=wrt, of=of, target="webgpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_transformation_fails_at_unknown_ranks(way: str) -> None:
    """Each gives a model, or an error with a reason that is none of Python's own."""
    built = 0
    for case in ONE_EACH:
        plain, feed, results = _built(case)
        model, _ = hidden(plain, feed, results)
        try:
            built += WAYS[way](model, _sources(case), _targets(case, results)[0]) is not None
        except (og.errors.InternalError, og.errors.RuleContractError):
            raise
        except og.ConvGradError as refusal:
            if "Error:" in str(refusal):  # one of Python's own
                raise
    assert built > 0 or way in ("per sample", "share", "training", "vmap")
