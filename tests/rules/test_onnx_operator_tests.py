"""ONNX's own tests of its operators: the gradients of each at the inputs of the test, against numeric derivatives.

Where an input of a test is at a kink, at a tie or at a change of the number of results, a point nearby is checked.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_NOT_IN_NUMPY = {
    kind
    for name, kind in TensorProto.DataType.items()
    if name.startswith(("FLOAT8", "FLOAT4", "INT4", "INT2", "UINT4", "UINT2"))
}
"""Element types of inputs that cannot be fed: their tests are left out."""

_SHARDS = 16

NO_TYPE = {"FLOAT4E2M1", "FLOAT8E8M0", "INT2", "UINT2"}
"""Element types that opset 21 does not have: a model that casts or dequantizes them is refused."""

OTHER = {
    "test_maxunpool_export_with_output_shape": "ONNX's evaluator reads the indices in the shape without `output_shape`",
    "test_range_bfloat16_type_positive_delta": "the number of results depends on how the operands are rounded",
    "test_range_bfloat16_type_positive_delta_expanded": "the same",
}
"""Tests without a numeric derivative, with the reason; the operators are checked in their families' tests."""

SIZES = {"depth", "r", "roi", "scales"}
"""Floating inputs that hold sizes, or the ratio of Dropout."""


def _element(kind: onnx.TypeProto) -> int:
    for nested in ("sequence_type", "optional_type"):
        if kind.HasField(nested):
            return _element(getattr(kind, nested).elem_type)
    return kind.tensor_type.elem_type


def _tensors(values: Any) -> list[str]:
    """The names of the floating tensors."""
    return [v.name for v in values if v.type.HasField("tensor_type") and _element(v.type) in _FLOATS]


def _in_float32(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with Casts around it that make its inputs and results of bfloat16 float32, and the new input names.

    NumPy has no such type, so that ONNX Runtime cannot be fed with it.
    """
    narrow = {TensorProto.BFLOAT16}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names, before, after = {}, [], []
    for value, casts in [*((v, before) for v in copy.graph.input), *((v, after) for v in copy.graph.output)]:
        kind, name = _element(value.type), value.name
        if not value.type.HasField("tensor_type") or kind not in narrow:
            continue
        names[name] = value.name = f"{name}_wide"
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        ends = (value.name, name, kind) if casts is before else (name, value.name, TensorProto.FLOAT)
        casts.append(helper.make_node("Cast", [ends[0]], [ends[1]], to=ends[2]))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*before, *copy.graph.node, *after)]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy, names


def _finite(value: Any) -> Any:
    """An input of a test; infinite numbers, along which there is no difference, are large ones."""
    if isinstance(value, list) or value is None:
        return value
    array = np.asarray(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
    name = array.dtype.name
    if "int4" in name or ("float" in name and array.dtype not in (np.float16, np.float32, np.float64)):
        array = array.astype(np.float32)
    return np.asarray(np.nan_to_num(array, nan=0.5, posinf=30, neginf=-30)) if array.dtype.kind == "f" else array


@functools.cache
def _cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(0)  # noqa: NPY002 - the tests draw from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        floating = [
            c for c in collect_testcases(None) if _tensors(c.model.graph.input) and _tensors(c.model.graph.output)
        ]
    return [c for c in floating if not any(_element(v.type) in _NOT_IN_NUMPY for v in c.model.graph.input)]


def _points(feed: Mapping[str, Any], wrt: list[str]) -> Iterator[dict[str, Any]]:
    """The inputs of the test, and two points nearby."""
    yield dict(feed)
    for sign in (1, -1):
        draw = np.random.default_rng(3)
        moved = dict(feed)
        for name in wrt:
            near = feed[name] * (1 - sign * 0.05 * draw.uniform(0, 1, feed[name].shape))
            moved[name] = np.asarray(near + 1e-3 * draw.uniform(-1, 1, near.shape), feed[name].dtype)
        yield moved


def _fault(case: Any) -> str | None:
    """The fault of the gradients of one test; `None` if they have none, or if it draws random numbers."""
    model, renamed = _in_float32(case.model)
    floats = [renamed.get(name, name) for name in _tensors(case.model.graph.input)]
    wrt = [name for name in floats if name not in SIZES] or floats
    of = _tensors(model.graph.output)
    values = zip(case.model.graph.input, case.data_sets[0][0], strict=False)
    feed = {renamed.get(i.name, i.name): _finite(v) for i, v in values}
    built = build(model, Options(wrt=wrt, of=of, outputs=False))
    loose = 0.1 if renamed else 0.0
    faults = []
    for point in _points(feed, wrt):
        try:
            rows = verify_numerically(built, feed=point).rows
        except og.errors.ModelError as problem:
            if "draws random numbers" in problem.message:
                return None
            raise
        except ValueError as problem:  # another number of results
            faults.append(str(problem))
            continue
        bad = [r for r in rows if not r.ok and not max(r.numeric or 0, r.torch or 0) < loose]
        # a result that is infinite has no numeric derivative; then PyTorch's is the reference
        bad = [r for r in bad if not (np.isnan(r.numeric or 0) and (r.norm == 0 or (r.torch or 1) < r.torch_limit))]
        if not bad:
            return None
        faults.append(", ".join(f"{r.value} is off by {r.numeric:.1e}" for r in bad))
    return faults[0]


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_gradients_of_operator_tests(shard: int) -> None:
    wrong, refused = {}, set()
    cases = [case for case in _cases() if case.name not in OTHER][shard::_SHARDS]
    assert len(cases) > 50
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zero gradients, and overflows of the tests' own inputs
            try:
                fault = _fault(case)
            except og.errors.ModelError as problem:
                fault = f"{problem}"
                if any(name in problem.message for name in NO_TYPE):
                    refused.add(case.name)
                    continue
        if fault is not None:
            wrong[case.name] = fault
    assert not wrong
    assert all(name.startswith(("test_cast", "test_dequantizelinear")) for name in refused)
