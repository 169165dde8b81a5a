"""Every change that ONNX made to an operator since the oldest opset is adapted, or explained here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import onnx
from onnx import helper

from onnx_convgrad.frontend.opset.adapters import ADAPTERS
from onnx_convgrad.frontend.opset.upgrade import CANONICAL_OPSET, NEWEST_OPSET, OLDEST_OPSET

_INSTALLED = onnx.defs.onnx_opset_version()

_NEW_DEFAULT = "new attribute whose default is the old behaviour"
_OPTIONAL = "an operand became optional; old models give it"
UNCHANGED = {
    ("ArgMax", 12): _NEW_DEFAULT,
    ("ArgMin", 12): _NEW_DEFAULT,
    ("AveragePool", 10): _NEW_DEFAULT,
    ("AveragePool", 19): _NEW_DEFAULT,
    ("Cast", 19): _NEW_DEFAULT,
    ("CastLike", 19): _NEW_DEFAULT,
    ("Constant", 11): "the value may be sparse, too; a dense one is written as before",
    ("Constant", 12): _NEW_DEFAULT,
    ("DepthToSpace", 11): _NEW_DEFAULT,
    ("DequantizeLinear", 13): "per-axis quantisation; before, the scale was a scalar, for which axis is ignored",
    ("DequantizeLinear", 21): _NEW_DEFAULT,
    ("GRU", 14): _NEW_DEFAULT,
    ("GatherND", 12): _NEW_DEFAULT,
    ("Gemm", 11): _OPTIONAL,
    ("LSTM", 14): _NEW_DEFAULT,
    ("LpPool", 18): _NEW_DEFAULT,
    ("MaxPool", 8): "a second output and the order in which it counts",
    ("MaxPool", 10): _NEW_DEFAULT,
    ("OptionalHasElement", 18): _OPTIONAL,
    ("Pad", 18): "optional axes; without them pads covers all axes as before",
    ("QuantizeLinear", 13): "per-axis quantisation; before, the scale was a scalar, for which axis is ignored",
    ("QuantizeLinear", 19): _NEW_DEFAULT,
    ("QuantizeLinear", 21): _NEW_DEFAULT,
    ("RNN", 14): _NEW_DEFAULT,
    ("Reshape", 14): _NEW_DEFAULT,
    ("Resize", 18): _NEW_DEFAULT,
    ("ScatterElements", 16): _NEW_DEFAULT,
    ("ScatterND", 16): _NEW_DEFAULT,
    ("Shape", 15): _NEW_DEFAULT,
    ("TopK", 11): _NEW_DEFAULT,
    ("Upsample", 10): "deprecated: every Upsample becomes a Resize",
    ("Cast", 24): "adapted with the element types of 23",
    ("Loop", 11): "a body that carries nothing may have no operands",
    # The function bodies are taken from the version that the model imports.
    ("Attention", 24): "replaced by its function body",
    ("Attention", 25): "replaced by its function body",
}
_REPLACED = {
    "Attention",
    "CausalConvWithState",
    "LinearAttention",
    "RMSNormalization",
    "RotaryEmbedding",
    "SwiGLU",
    "Swish",
}
_REFUSED = {"BitCast", "CumProd", "TensorScatter"}


def _interface(schema: onnx.defs.OpSchema) -> tuple[Any, ...]:
    def default(attribute: onnx.defs.OpSchema.Attribute) -> str:
        proto = attribute.default_value
        return str(helper.get_attribute_value(proto)) if proto.name else ""

    return (
        [(formal.option, formal.min_arity) for formal in schema.inputs],
        [(formal.option, formal.min_arity) for formal in schema.outputs],
        {name: (a.type, a.required, default(a)) for name, a in schema.attributes.items()},
        schema.deprecated,
    )


def _history() -> dict[str, list[onnx.defs.OpSchema]]:
    history = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            history[schema.name].append(schema)
    return {name: sorted(schemas, key=lambda s: s.since_version) for name, schemas in history.items()}


def test_every_change_is_adapted_or_explained() -> None:
    missing = []
    for name, schemas in _history().items():
        known = {step.since for step in ADAPTERS.get(name, ())} | {since for op, since in UNCHANGED if op == name}
        for old, new in itertools.pairwise(schemas):
            changed = _interface(old) != _interface(new)
            if new.since_version > OLDEST_OPSET and changed and new.since_version not in known:
                missing.append((name, new.since_version))
    assert not missing


def test_every_newer_operator_is_replaced_or_refused() -> None:
    newer = {name for name, schemas in _history().items() if schemas[0].since_version > CANONICAL_OPSET}
    assert newer <= _REPLACED | _REFUSED


def test_explanations_are_about_real_changes() -> None:
    versions = {(name, schema.since_version) for name, schemas in _history().items() for schema in schemas}
    assert {key for key in UNCHANGED if key[1] <= _INSTALLED} <= versions
