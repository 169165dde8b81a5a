"""Models whose structure no stage could rely on are refused when they are read, with the place and the reason."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, graph_of, of_rows

Change = Callable[[onnx.ModelProto], Any]
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def _changed(model: onnx.ModelProto, change: Change) -> onnx.ModelProto:
    change(model)
    return model


def _with_weight(change: Callable[[TensorProto], Any]) -> onnx.ModelProto:
    model = graph_of("(float[2,3] x) => (float[2,3] y) { y = Mul (x, w) }", w=WEIGHT)
    return _changed(model, lambda m: change(m.graph.initializer[0]))


def _tensor(**fields: Any) -> onnx.ModelProto:
    def replace(tensor: TensorProto) -> None:
        tensor.CopyFrom(TensorProto(name="w", **{"data_type": 1, "dims": [2, 3], **fields}))

    return _with_weight(replace)


def _reference(op_type: str, name: str, kind: int, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(op_type, ["x"], ["y"], **attributes)
    node.attribute.add(name=name, type=kind, ref_attr_name="alpha")
    model = of_rows("{ y = Tanh (x) }")
    model.graph.node[0].CopyFrom(node)
    return model


def _functions(body: str) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["": 17, "f": 1]> g (float[2,3] x) => (float[2,3] y) { y = f.F (x) }'
    return onnx.parser.parse_model(f'{head} <domain: "f", opset_import: ["": 17, "f": 1]> {body}')


def _nested(levels: int) -> onnx.ModelProto:
    inner = helper.make_graph(
        [helper.make_node("Tanh", ["x"], ["v"])], "b", [], [helper.make_empty_tensor_value_info("v")]
    )
    other = onnx.GraphProto()
    other.CopyFrom(inner)
    for level in range(levels):
        node = helper.make_node("If", ["c"], [f"u{level}"], then_branch=inner, else_branch=other)
        inner = helper.make_graph([node], "b", [], [helper.make_empty_tensor_value_info(f"u{level}")])
    model = graph_of("(float[2,3] x, bool c) => (y) { }")
    del model.graph.output[:]
    model.graph.MergeFrom(onnx.GraphProto(node=inner.node, output=inner.output))
    return model


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "raw data of another length": (
        lambda: _tensor(raw_data=b"\0" * 8),
        r"'w' of shape \[2, 3\] takes 24 bytes, but.* 8",
    ),
    "numbers of another count": (
        lambda: _tensor(float_data=[1.0]),
        r"'w' of shape \[2, 3\] takes 6 numbers, but.* 1",
    ),
    "a negative size": (lambda: _tensor(dims=[-1, 3]), r"weight 'w' cannot have the shape \[-1, 3\]"),
    "more elements than 64 bits count": (lambda: _tensor(dims=[2**62, 4]), "weight 'w' cannot have the shape"),
    "an unknown element type": (lambda: _tensor(data_type=99), "99 is not a valid DataType"),
    "strings as raw data": (lambda: _tensor(data_type=8, raw_data=b"ab"), r"weight 'w' of shape \[2,3\] has 0 strings"),
    "a Constant that holds less than its dims": (
        lambda: _changed(
            graph_of("(float[2,3] x) => (float[2,3] y) { c = Constant <value = float[1] {1}> () y = Mul (x, c) }"),
            lambda m: m.graph.node[0].attribute[0].t.dims.__setitem__(0, 2**62),
        ),
        "attribute value of node 'c' \\(Constant\\)",
    ),
    "an input larger than 64 bits": (
        lambda: _changed(
            of_rows("{ y = Tanh (x) }"),
            lambda m: [setattr(d, "dim_value", 2**62) for d in m.graph.input[0].type.tensor_type.shape.dim],
        ),
        "value 'x' of shape .* more elements than 64 bits count",
    ),
    "an input listed twice": (
        lambda: _changed(of_rows("{ y = Tanh (x) }"), lambda m: m.graph.input.append(m.graph.input[0])),
        "input 'x' of the model is listed 2 times",
    ),
    "an input without a type": (
        lambda: _changed(of_rows("{ y = Tanh (x) }"), lambda m: m.graph.input[0].ClearField("type")),
        "input 'x' of the model has no type",
    ),
    "a value defined twice": (
        lambda: of_rows("{ y = Tanh (x) y = Sin (x) }"),
        "'y' is redeclared",
    ),
    "a stored weight declared otherwise": (
        lambda: _changed(
            graph_of("(float[2,3] x) => (float[2,3] y) { y = Mul (x, w) }", w=WEIGHT),
            lambda m: m.graph.input.append(helper.make_tensor_value_info("w", 1, [7])),
        ),
        r"weight 'w' is FLOAT of shape \[2, 3\], but declared",
    ),
    "a reference to an attribute of no function": (
        lambda: _reference("Softmax", "axis", 2),
        "attribute 'axis' of node 'y' \\(Softmax\\) refers to the attribute 'alpha'",
    ),
    "a reference that is a graph": (lambda: _reference("If", "then_branch", 5), "refers to the attribute 'alpha'.*"),
    "a reference to an attribute that the function lacks": (
        lambda: _changed(
            _functions("F (a) => (b) { b = Softmax (a) }"),
            lambda m: m.functions[0].node[0].attribute.add(name="axis", type=2, ref_attr_name="alpha"),
        ),
        "of function 'F' refers to the attribute 'alpha' of a function, which it does not have",
    ),
    "a recursive function": (lambda: _functions("F (a) => (b) { b = f.F (a) }"), "function 'F' calls itself"),
    "a call with too many operands": (
        lambda: _changed(_functions("F (a) => (b) { b = Tanh (a) }"), lambda m: m.graph.node[0].input.append("x")),
        "has 2 inputs, but its function has 1",
    ),
    "a function of no possible opset": (
        lambda: _changed(
            _functions("F (a) => (b) { b = Tanh (a) }"),
            lambda m: setattr(m.functions[0].opset_import[0], "version", 10**9),
        ),
        "functions cannot be inlined",
    ),
    "a name that is not UTF-8": (
        lambda: onnx.load_from_string(
            of_rows("{ yyyy = Tanh (x) y = Sin (yyyy) }").SerializeToString().replace(b"yyyy", b"\xff\xfe\xff\xfe")
        ),
        "not UTF-8 text",
    ),
    "an axis that no tensor has": (
        lambda: of_rows("{ y = Softmax <axis = 4611686018427387904> (x) }"),
        "its axis is 4611686018427387904, and no tensor has that many axes",
    ),
    "a switch that is neither on nor off": (
        lambda: of_rows("{ s = ReduceSum <keepdims = -2> (x) y = Add (x, s) }"),
        "its keepdims is -2, and must be 0 or 1",
    ),
    "more axes than NumPy has": (
        lambda: graph_of(f"(float[{','.join('1' * 65)}] x) => (y) {{ y = Tanh (x) }}"),
        "value 'x' has 65 axes, and at most 64 are supported",
    ),
    "an attribute that is not a number": (
        lambda: _changed(
            of_rows("{ y = Elu <alpha = 1.0> (x) }"), lambda m: setattr(m.graph.node[0].attribute[0], "f", np.nan)
        ),
        "its attribute alpha is nan",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(make(), wrt="inputs")


def test_a_stored_weight_that_is_listed_twice_has_its_gradient() -> None:
    """ONNX Runtime accepts the repetition, which used to make the gradient zero."""
    model = graph_of("(float[2,3] x, float[2,3] w) => (float[2,3] y) { y = Mul (x, w) }", w=WEIGHT)
    model.graph.input.append(model.graph.input[1])
    got = run(og.augment(model, wrt="all", cotangents="ones"), {"x": ROWS})
    np.testing.assert_array_equal(got["w_grad"], ROWS)
    np.testing.assert_array_equal(got["x_grad"], WEIGHT)


def test_an_input_keeps_its_type_where_the_output_of_its_name_has_another() -> None:
    model = of_rows("{ y = Tanh (x) }")
    model.graph.output.append(helper.make_tensor_value_info("x", TensorProto.INT64, [9]))
    got = run(og.augment(model, wrt="inputs", of="y", cotangents="ones"), {"x": ROWS})
    np.testing.assert_array_equal(got["x"], ROWS)


DOUBLED = 24


def _doubling(levels: int) -> onnx.ModelProto:
    """Functions that each call the next one twice."""
    model = _functions("F (a) => (b) { b = f.F0 (a) }")
    for level in range(levels):
        last = level == levels - 1
        step = model.functions.add(name=f"F{level}", domain="f", input=["a"], output=["b"])
        step.opset_import.extend(model.functions[0].opset_import)
        for source, result in (("a", "c"), ("c", "b")):
            kind = ("Tanh", "") if last else (f"F{level + 1}", "f")
            step.node.add(op_type=kind[0], domain=kind[1], input=[source], output=[result])
    return model


def test_functions_that_expand_to_millions_of_nodes_are_refused_and_others_are_not() -> None:
    with pytest.raises(
        og.errors.LimitError, match=r"Inlining the model's functions asks for [\d,]+ nodes.*--limit nodes="
    ):
        og.augment(_doubling(DOUBLED), wrt="inputs")
    with pytest.raises(og.errors.LimitError):
        og.augment(og.load(_doubling(5), limits=og.Limits(nodes=20)), wrt="inputs")
    got = run(
        og.augment(og.load(_doubling(5), limits=og.Limits(nodes=200)), wrt="inputs", cotangents="ones"), {"x": ROWS}
    )
    assert np.isfinite(got["x_grad"]).all()


def test_graphs_are_not_nested_without_bounds() -> None:
    with pytest.raises(og.errors.LimitError, match="The nesting of graphs asks for 5 depth, and at most 4 are allowed"):
        og.augment(og.load(_nested(8), limits=og.Limits(depth=4)), wrt="inputs")


CRASHES = {
    "Split with fewer parts than outputs": (
        18,
        "(float[7] x) => (float[N] y, float[M] z) { y, z = Split <num_outputs = 1> (x) }",
    ),
    "LayerNormalization of axis 2**31": (
        17,
        "(float[2,3] x, float[3] w) => (y, m, v) { y, m, v = LayerNormalization <axis = 2147483648> (x, w) }",
    ),
    "LayerNormalization of axis -2**31, which takes 24 GB": (
        17,
        "(float[2,3] x, float[3] w) => (float[2,3] y) { y = LayerNormalization <axis = -2147483648> (x, w) }",
    ),
    "GatherND of negative batch_dims": (
        13,
        "(float[2,2,2] x, int64[2,1] i) => (float[N] y) { y = GatherND <batch_dims = -2> (x, i) }",
    ),
    "EyeLike of an operand of unknown type": (
        17,
        "(float[2,3] x) => (float[2,3] y) { u = local.Unknown (x) e = EyeLike (u) y = Mul (x, e) }",
    ),
}
AUGMENT = (
    "import sys, onnx, onnx_convgrad as og\n"
    "try: og.augment(onnx.load_from_string(sys.stdin.buffer.read()), wrt='inputs')\n"
    "except og.ConvGradError as problem: print(type(problem).__name__)\n"
    "else: print('accepted')"
)


@pytest.mark.parametrize("case", CRASHES)
def test_nodes_on_which_onnx_ends_the_process(case: str) -> None:
    opset, text = CRASHES[case]
    model = graph_of(text, opset=opset, domains=', "local": 1')
    done = subprocess.run(
        [sys.executable, "-c", AUGMENT],
        input=model.SerializeToString(),
        capture_output=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == ("accepted" if "EyeLike" in case else "ModelError")


def test_a_sparse_weight_is_measured_before_it_is_made_dense() -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "v")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([5]), "i"), [2**40])
    model = of_rows("{ w = Constant <value = float {1}> () y = Mul (x, w) }")
    model.graph.node[0].CopyFrom(helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    with pytest.raises(og.errors.LimitError, match=r"sparse tensor 'w' asks for 4,398,046,511,104 constant bytes"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize("name", ["9**9**9", "2**2**40", "((9**9)**9)**9", "(" * 300, "N%0", "9" * 40, "floor(N/0)"])
def test_names_of_dimensions_are_not_evaluated_without_bounds(name: str) -> None:
    model = graph_of("(float[N,3] x) => (float[N,3] y) { y = Tanh (x) }")
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = name
    got = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": ROWS})
    np.testing.assert_allclose(got["x_grad"], 1 - np.tanh(ROWS) ** 2, rtol=1e-5)


def test_sequences_have_no_derivative_of_their_own() -> None:
    model = graph_of("(seq(float) x) => (seq(float) y) { y = Identity (x) }")
    with pytest.raises(
        og.errors.ArgumentError, match=r"no floating input\. Sequences and optional values have no derivative"
    ):
        og.augment(model, wrt="inputs")
    with pytest.raises(og.errors.ArgumentError, match=r"wrt names 'x', which is Sequence.*, not a floating tensor"):
        og.augment(model, wrt=["x"])


def test_types_that_only_a_newer_opset_takes() -> None:
    model = graph_of(
        '(float[3] x, int32[3] i) => (y) { s = BitShift <direction = "LEFT"> (i, i) c = Cast <to = 1> (s) y = Mul (x, c) }',
        opset=26,
    )
    with pytest.raises(og.errors.ModelError, match=r"BitShift, opset 26.*at opset 21 it does not take INT32"):
        og.augment(model, wrt="inputs")


def _doubled(op: str, first: str, count: int = 70) -> str:
    """Nodes that each read the last result twice."""
    names = [first, *(f"d{i}" for i in range(count))]
    attribute = " <axis = 0>" if op == "Concat" else ""
    return " ".join(f"{b} = {op}{attribute} ({a}, {a})" for a, b in itertools.pairwise(names))


@pytest.mark.parametrize(
    "body",
    [f"{{ y = Tanh (x) {_doubled('Concat', 'y')} }}", f"{{ y = Tanh (x) s = Shape (x) {_doubled('Mul', 's')} }}"],
)
def test_values_that_are_read_twice_again_and_again(body: str) -> None:
    for wrt in ("inputs", "all"):
        model = og.augment(of_rows(body), wrt=wrt, of="y", cotangents="ones")
        np.testing.assert_allclose(run(model, {"x": ROWS})["x_grad"], 1 - np.tanh(ROWS) ** 2, rtol=1e-5)


def test_a_function_with_the_name_of_an_operator_is_refused() -> None:
    """ONNX Runtime runs its own operator instead."""
    model = of_rows("{ y = Relu (x) }")
    model.functions.append(_functions("Relu (a) => (b) { b = Tanh (a) }").functions[0])
    model.functions[0].domain = ""
    with pytest.raises(og.errors.ModelError, match="function with the name of the operator 'Relu'"):
        og.augment(model, wrt="inputs")


def test_the_given_model_is_never_changed() -> None:
    model = graph_of("(float[2,3] x) => (float[2,3] y) { c = Constant <value = float[3] {1, 2, 3}> () y = Mul (x, c) }")
    model.graph.node[0].attribute[0].t.name = ""
    before = model.SerializeToString(deterministic=True)
    og.augment(model, wrt="inputs")
    og.transforms.lower_gradient_ops(model)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.slow
def test_many_calls_are_inlined_in_time_and_keep_external_weights(tmp_path: Path) -> None:
    model = _doubling(11)
    model.graph.node[0].input[0] = "h"
    model.graph.node.insert(0, helper.make_node("Mul", ["x", "w"], ["h"]))
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2, 3]), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    result = og.augment(tmp_path / "m.onnx", wrt="parameters", cotangents="ones")
    assert sum(node.op_type == "Tanh" for node in result.graph.node) == 2**11
    assert np.isfinite(run(result, {"x": ROWS})["w_grad"]).all()


def test_a_window_of_a_billion_in_a_branch_is_not_written_out() -> None:
    branches = (
        "then_branch = t () => (float[K] p) { p = HannWindow (n) }, else_branch = e () => (q) { q = Identity (x) }"
    )
    text = f"(float[3] x, bool c) => (float[3] y) <int64 n = {{1000000000}}> {{ w = If (c) <{branches}> y = Sin (x) }}"
    model = og.augment(graph_of(text), wrt="inputs")
    assert [output.name for output in model.graph.output] == ["y", "x_grad"]


def test_a_vector_of_a_billion_equal_numbers_is_not_written_out() -> None:
    """ONNX's inference takes over where the symbolic one stops, as at a sequence that is added."""
    body = "{ s = SplitToSequence (x, k) c = ConstantOfShape (n) v = Add (s, c) y = Sin (x) }"
    text = f"(float[3] x, int64 k) => (float[3] y) <int64[1] n = {{1000000000}}> {body}"
    assert len(og.augment(graph_of(text), wrt="inputs").graph.output) == 2


def test_a_branch_that_reads_the_result_of_its_own_node_is_refused() -> None:
    branches = "then_branch = t () => (p) { p = Sin (y) }, else_branch = e () => (q) { q = Sin (x) }"
    with pytest.raises(og.errors.ModelError, match=r"topologically sorted|put in order|cannot be copied"):
        og.augment(graph_of(f"(float[3] x, bool c) => (float[3] y) {{ y = If (c) <{branches}> }}"), wrt="inputs")


def test_notes_that_are_not_text_are_left_out() -> None:
    """Metadata and documentation of the model, its graph, values, nodes and attributes."""
    model = graph_of("(float[3] x) => (float[3] y) { z = Elu <alpha = 0.5> (x) y = Tanh (z) }")
    graph, node = model.graph, model.graph.node[0]
    graph.value_info.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [3]))
    for noted in (model, graph, node, graph.input[0], graph.output[0], graph.value_info[0]):
        noted.metadata_props.add(key="????", value="a")
        noted.metadata_props.add(key="b", value="????")
        noted.metadata_props.add(key="c", value="d")
        noted.doc_string = "????"
    node.attribute[0].doc_string = "????"
    damaged = onnx.load_from_string(model.SerializeToString().replace(b"????", b"\xff\xfe\xff\xfe"))
    built = og.augment(damaged, wrt="inputs")
    assert [(p.key, p.value) for p in built.graph.node[0].metadata_props] == [("c", "d")]
    x = np.array([-1, 0, 2], np.float32)
    assert run(built, {"x": x, "y_grad": np.ones(3, np.float32)})["x_grad"].shape == (3,)
