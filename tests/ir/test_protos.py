"""A model becomes the proto that onnx_ir makes of it, field by field."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_convgrad.ir.protos import proto_of


def _rich() -> ir.Model:
    """A model with bodies, symbols, weights, notes, annotations, sequences, absent operands and many kinds of attributes."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "other": 1], producer_name: "tests", doc_string: "a net",
            metadata_props: ["b": "2", "a": "1"]>
        net (float[N, 4, ?] x, bool flag, float[3, 4] unused) => (float[N, 4, M] y, seq(float) parts, z) {
            a = Clip (x, , high)
            s = other.Made <ratio = 0.5, name = "no", axes = [1, 2], words = ["a", "b"], numbers = [0.5, 1.5]> (a)
            y, mask = Dropout <seed = 3> (s)
            z = If (flag) <then_branch = t () => (float[N] p) <float[1] c = {2.0}> { p = Mul (high, c) },
                           else_branch = e () => (float[N] q) { q = Relu (high) }>
            parts = SplitToSequence <axis = -1> (x)
            k = Constant <value = float[2] {1.0, 2.0}> ()
        }"""
    )
    graph = proto.graph
    graph.initializer.append(numpy_helper.from_array(np.float32(6), "high"))
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.input[2].doc_string = "nobody reads it"
    graph.node[0].metadata_props.add(key="from", value="here")
    graph.node[1].doc_string = "of another domain"
    graph.metadata_props.add(key="of", value="the graph")
    graph.value_info.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", 4, None]))
    graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, None))
    annotation = graph.quantization_annotation.add(tensor_name="s")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="high")
    return ir.from_proto(proto)


def test_a_model_with_everything_gives_the_proto_of_onnx_ir() -> None:
    model = _rich()
    assert proto_of(model) == ir.to_proto(model)


def test_a_model_with_functions_gives_the_proto_of_onnx_ir() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 21, "own": 1]>
            net (float[2] x) => (float[2] y) { y = own.Twice (x) }
            <domain: "own", opset_import: ["": 21]> Twice (a) => (b) { b = Add (a, a) }"""
        )
    )
    assert proto_of(model) == ir.to_proto(model)


def test_an_unnamed_result_is_refused_with_its_place() -> None:
    model = _rich()
    model.graph[0].outputs[0].name = None
    with pytest.raises(ir.serde.SerdeError, match="serialize_model_into"):
        proto_of(model)
