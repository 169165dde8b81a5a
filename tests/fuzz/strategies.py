"""Models of one operator, drawn from ONNX's schemas: operands of any dtype and rank, attributes with odd values."""

from __future__ import annotations

import random
import re

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import ModelProto, TypeProto, helper, numpy_helper
from onnx.defs import OpSchema

from tests.fuzz.mutate import odd_attribute

SCHEMAS = [s for s in onnx.defs.get_all_schemas_with_history() if s.domain != "ai.onnx.preview" and not s.deprecated]
COMMON = [s for s in onnx.defs.get_all_schemas() if s.domain == ""]
PLAUSIBLE = (0, 1, 1, 2, 2, 3, 4, -1)


def operator_model(r: random.Random) -> ModelProto:
    """One node of any operator; each integer operand is stored or an input."""
    schema = r.choice(COMMON if r.random() < 0.7 else SCHEMAS)
    types: dict[str, str] = {}  # what the type variables of the schema stand for
    inputs, stored, names = [], [], []
    for formal in _operands(schema.inputs, schema.min_input, r):
        name = "" if formal.option == OpSchema.FormalParameterOption.Optional and r.random() < 0.4 else f"x{len(names)}"
        names.append(name)
        if not name:
            continue
        text = _type(formal, schema, types, r)
        kind = _proto(text, r)
        if kind.HasField("tensor_type") and r.random() < (0.6 if "int" in text or "bool" in text else 0.1):
            stored.append(_tensor(name, kind, r))
        else:
            inputs.append(helper.make_value_info(name, kind))
    node = helper.make_node(schema.name, names, [], domain=schema.domain)
    for name, declared in sorted(schema.attributes.items()):
        if declared.required or r.random() < 0.4:
            a = odd_attribute(name, declared.type.value, r)
            if a.type == onnx.AttributeProto.INT and r.random() < 0.6:
                a.i = r.choice(PLAUSIBLE)
            if a.ints and r.random() < 0.6:
                a.ints[:] = r.choices(PLAUSIBLE, k=r.randrange(1, 5))
            node.attribute.append(a)
    outputs = []
    for formal in _operands(schema.outputs, max(schema.min_output, 1), r):
        node.output.append(f"y{len(node.output)}")
        kind = _proto(_type(formal, schema, types, r), r)
        if kind.HasField("tensor_type"):
            kind.tensor_type.ClearField("shape")
        outputs.append(helper.make_value_info(node.output[-1], kind))
    graph = helper.make_graph([node], "g", inputs, outputs, stored)
    version = r.choice((schema.since_version, 17, 21)) if schema.domain == "" else schema.since_version
    opsets = [helper.make_opsetid(schema.domain, version), *([helper.make_opsetid("", 21)] if schema.domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _operands(formals: list[OpSchema.FormalParameter], least: int, r: random.Random) -> list[OpSchema.FormalParameter]:
    count = r.randint(min(least, len(formals)), len(formals))
    chosen = list(formals[:count])
    if chosen and chosen[-1].option == OpSchema.FormalParameterOption.Variadic:
        chosen += [chosen[-1]] * r.randrange(3)
    return chosen


def _type(formal: OpSchema.FormalParameter, schema: OpSchema, types: dict[str, str], r: random.Random) -> str:
    variable = formal.type_str
    if variable not in types:
        allowed = next(
            (c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == variable), [variable]
        )
        types[variable] = (
            "tensor(float)" if "tensor(float)" in allowed and r.random() < 0.6 else r.choice(sorted(allowed))
        )
    return types[variable]


def _proto(text: str, r: random.Random) -> TypeProto:
    """The type that a schema writes as `seq(tensor(float))`, with a drawn shape."""
    outer, _, inner = re.sub(r"\)$", "", text).partition("(")
    if outer == "seq":
        return helper.make_sequence_type_proto(_proto(inner, r))
    if outer == "optional":
        return helper.make_optional_type_proto(_proto(inner, r))
    if outer == "map":
        key, _, value = inner.partition(",")
        return helper.make_map_type_proto(onnx.TensorProto.DataType.Value(key.upper()), _proto(value.strip(), r))
    name = (inner or outer).upper()
    dims = [r.choice((0, 1, 2, 2, 3, 3, 4, "N", "M", None)) for _ in range(r.choice((0, 1, 1, 2, 2, 3, 4, 4, 5)))]
    return helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(name), dims if r.random() < 0.95 else None)


def _tensor(name: str, kind: TypeProto, r: random.Random) -> onnx.TensorProto:
    shape = [d.dim_value for d in kind.tensor_type.shape.dim]
    values = np.reshape([r.choice(PLAUSIBLE) for _ in range(int(np.prod(shape)))], shape)
    dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    return numpy_helper.from_array(
        values.astype(dtype) if dtype.kind != "O" else values.astype(str).astype(object), name
    )


def operator_models() -> st.SearchStrategy[ModelProto]:
    """Models of one operator, which hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(operator_model)
