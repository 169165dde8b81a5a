"""Every change that ONNX made to an operator since the oldest opset is converted, or explained here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import onnx
from onnx import helper

from onnx_convgrad.frontend.opset.converters import CONVERTERS
from onnx_convgrad.frontend.opset.upgrade import CANONICAL_OPSET, NEWEST_OPSET, OLDEST_OPSET

_INSTALLED = onnx.defs.onnx_opset_version()

EXPLAINED = {
    "new attribute whose default is the old behavior": """
        ArgMax-12 ArgMin-12 AveragePool-10 AveragePool-19 Cast-19 CastLike-19 Constant-12 DepthToSpace-11
        DequantizeLinear-21 GRU-14 GatherND-12 LSTM-14 LpPool-18 MaxPool-10 QuantizeLinear-19 QuantizeLinear-21 RNN-14
        Reshape-14 Resize-18 ScatterElements-16 ScatterND-16 Shape-15 TopK-11""",
    "an operand became optional; old models give it": "Gemm-11 OptionalHasElement-18",
    "the value may be sparse, too; a dense one is written as before": "Constant-11",
    "per-axis quantisation; before, the scale was a scalar, for which axis is ignored": """
        DequantizeLinear-13 QuantizeLinear-13""",
    "a second output and the order in which it counts": "MaxPool-8",
    "optional axes; without them pads covers all axes as before": "Pad-18",
    "deprecated: every Upsample becomes a Resize": "Upsample-10",
    "converted with the element types of 23": "Cast-24",
    "a body that carries nothing may have no operands": "Loop-11",
    "replaced by its function body, which is taken from the version that the model imports": "Attention-24 Attention-25",
}
UNCHANGED = {(op, int(since)) for names in EXPLAINED.values() for op, since in (n.split("-") for n in names.split())}
_REPLACED = set(
    "Attention CausalConvWithState CumProd LinearAttention RMSNormalization RotaryEmbedding SwiGLU Swish"
    " TensorScatter".split()
)
_REFUSED = {"BitCast"}


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


def test_every_change_is_converted_or_explained() -> None:
    missing = []
    for name, schemas in _history().items():
        known = {step.since for step in CONVERTERS.get(name, ())} | {since for op, since in UNCHANGED if op == name}
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
