"""Odd models that ONNX Runtime runs, and invalid models with the messages that refuse them."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.cli.app import main
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


def parsed(body: str) -> onnx.ModelProto:
    return graph_of(f"(float[2,3] x) => (float[2,3] y) {body}", domains=', "local": 1')


def gradient(model: onnx.ModelProto | Path) -> np.ndarray:
    result = og.augment(model, wrt="inputs", seed="ones")
    onnx.checker.check_model(result, full_check=True)
    return run(result, {"x": X})["x_grad"]


def test_nodes_in_any_order_and_a_graph_without_a_name() -> None:
    model = parsed("{ h = Tanh(x) y = Mul(h, x) }")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    model.graph.name = ""
    np.testing.assert_allclose(gradient(model), np.tanh(X) + X * (1 - np.tanh(X) ** 2), rtol=1e-5)


def test_a_graph_without_nodes() -> None:
    model = parsed("{ }")
    model.graph.output[0].name = "x"
    np.testing.assert_array_equal(gradient(model), np.ones_like(X))


def test_products_of_float16_that_crash_the_runtime(tmp_path: Path) -> None:
    """A MatMul with a constant that reads a Transpose of the first axis, which only the gradient contains."""
    model = graph_of(
        "(float16[N,5,3] x) => (float16[5,N,4] y) { h = MatMul (x, w)  y = Transpose <perm = [1, 0, 2]> (h) }"
    )
    w = np.arange(1, 13).reshape(3, 4).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(og.augment(model, wrt="inputs"), path)
    load = f"import onnxruntime as o; o.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    done = subprocess.run([sys.executable, "-c", load], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float16)
    seed = np.random.default_rng(1).standard_normal((5, 2, 4)).astype(np.float16)
    want = seed.transpose(1, 0, 2).astype(np.float64) @ w.T
    got = run(onnx.load(path), {"x": x, "y_grad": seed})["x_grad"]
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=0.05)


def test_an_input_that_is_an_output_without_a_type(tmp_path: Path) -> None:
    model = parsed("{ y = Tanh(x) }")
    model.graph.output.add(name="x")
    onnx.save(model, tmp_path / "model.onnx")
    for given in (model, tmp_path / "model.onnx"):
        got = run(og.augment(given, wrt="inputs", of="y", seed="ones"), {"x": X})
        np.testing.assert_array_equal(got["x"], X)
        np.testing.assert_allclose(got["x_grad"], 1 - np.tanh(X) ** 2, rtol=1e-5)


def test_a_function_of_an_older_opset() -> None:
    """Its ReduceSum has the axes as an attribute, that of the model as an operand."""
    model = parsed(
        """{ y = local.F (x) }
        <domain: "local", opset_import: ["": 12]> F (a) => (b) { s = ReduceSum <axes = [1]> (a) b = Mul (s, a) }"""
    )
    np.testing.assert_allclose(gradient(model), 2 * X.sum(1, keepdims=True) + 0 * X, rtol=1e-5)


@pytest.mark.parametrize("per_sample", [False, True], ids=["", "per sample"])
@pytest.mark.parametrize(
    "body",
    [
        "y = Conv(x, w)",
        "y = ConvTranspose<strides=[2,2]>(x, w)",
        "t = Transpose<perm=[0,1,3,2]>(x) y = Conv(t, w)",
        "p = AveragePool<kernel_shape=[2,1]>(x) y = Conv(p, w)",
    ],
)
def test_operators_give_the_rank_of_data_without_a_shape(body: str, per_sample: bool) -> None:
    generator = np.random.default_rng(0)
    feed = {"x": generator.standard_normal((2, 3, 4, 5)), "w": generator.standard_normal((3, 3, 2, 2))}
    feed = {name: a.astype(np.float32) for name, a in feed.items()}
    wrt = ["w"] if per_sample else ["x", "w"]
    models = (
        graph_of(f"(float[{sizes}] x, float[3,3,2,2] w) => (float[] y) {{ {body} }}") for sizes in ("2,3,4,5", "")
    )
    known, unknown = (og.augment(model, wrt=wrt, per_sample=per_sample, seed="ones") for model in models)
    assert len(unknown.graph.input[0].type.tensor_type.shape.dim) == 4
    want, got = run(known, feed), run(unknown, feed)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_a_path_gives_a_model_that_stands_alone(tmp_path: Path) -> None:
    """PyTorch's exporter writes the weights of every model beside it."""
    model = parsed("{ y = Mul (x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1, 2, 3]), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    np.testing.assert_array_equal(gradient(tmp_path / "m.onnx"), np.float32([[1, 2, 3]] * 2))
    program = og.build_training(tmp_path / "m.onnx", loss="mse", optimizer=og.optim.SGD(lr=np.float32(0.5)))
    assert np.isfinite(run(program.step, {"x": X, "target": X})["loss"])
    for shared in (False, True):
        program.save(tmp_path / "program", shared_weights=shared)
        trainer = og.Trainer(tmp_path / "program")
        assert np.isfinite(trainer.step({"x": X, "target": X})["loss"])
    with pytest.raises(SystemExit) as ended:
        main(["augment", str(tmp_path / "m.onnx"), "--check", "-q"])
    assert ended.value.code == 0
    (tmp_path / "m.onnx.data").write_bytes(b"cut")
    with pytest.raises(og.ModelError, match=r"'w' is in the file '.*m.onnx.data' up to byte \d+, but that has 3 bytes"):
        og.augment(tmp_path / "m.onnx")
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(og.ModelError, match=r"The weight 'w' is in the file '.*m.onnx.data', which is not there"):
        og.augment(tmp_path / "m.onnx")
    assert og.TrainingProgram.load(tmp_path / "program").manifest.optimizer["lr"] == 0.5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ a = Add (x, b) b = Relu (a) y = Relu (b) }", r"Node 'a' \(Add\) depends on its own result"),
        ("{ z = Relu (x) }", "The output 'y' is neither an input, nor an initializer, nor the result of a node"),
        ("{ y = Relu (x) y = Exp (x) }", "Output 'y' is redeclared in the current graph scope"),
        ("{ y = Einsum <equation = 'ab'> (x, x) }".replace("'", '"'), "The model is not valid"),
    ],
)
def test_wrong_models(body: str, message: str) -> None:
    with pytest.raises(og.ModelError, match=message):
        og.augment(parsed(body), wrt="inputs")


def test_a_name_that_the_terminal_cannot_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, a pipe has the encoding of the system's language."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    onnx.save(parsed("{ y = Tanh (x) }"), tmp_path / "字.onnx")
    with pytest.raises(SystemExit) as ended:
        main(["augment", str(tmp_path / "字.onnx"), "--wrt", "inputs"])
    assert ended.value.code == 0
    assert rb"\u5b57.grad.onnx" in written.getvalue()


def test_branches_of_known_condition() -> None:
    """Two branches use one name, the second If is inside the first, and the condition of the third depends on x."""
    model = parsed(
        """<int64 two = {2}, bool no = {0}> {
        s = Shape (x)  i = Constant <value = int64 {0}> ()  d = Gather (s, i)  c = Equal (d, two)
        a = If (c) <
            then_branch = t () => (float[2,3] p) {
                k = Constant <value = float[3] {1, 2, 3}> ()
                p = If (no) <then_branch = tt () => (float[2,3] q) {q = Neg (x)},
                             else_branch = te () => (float[2,3] r) {r = Mul (x, k)}>
            },
            else_branch = e () => (float[2,3] p) {p = Neg (x)}>
        y = If (no) <then_branch = u () => (float[2,3] v) {v = Neg (a)},
                     else_branch = w () => (float[2,3] p) {k = Constant <value = float {2}> () p = Mul (k, a)}>
        m = ReduceMax <keepdims = 0> (x)  h = Cast <to = 9> (m)
        z = If (h) <then_branch = l () => (float[2,3] o) {o = Neg (x)}, else_branch = n () => (float[2,3] o) {o = Exp (x)}>
        }"""
    )
    np.testing.assert_array_equal(gradient(model), np.float32([[2, 4, 6]] * 2))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [2, 3]))
    with pytest.raises(
        og.DifferentiationError, match=r"\(If, opset 21\): its condition .*sizes of the inputs may decide"
    ):
        og.augment(model, wrt="inputs")


def test_maps_are_refused_with_the_remedy() -> None:
    """scikit-learn's converter writes probabilities as maps by default."""
    model = parsed("{ y = Tanh (x) p = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (y) }")
    tensor = onnx.helper.make_tensor_type_proto(1, None)
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(7, tensor))
    model.graph.output.append(onnx.helper.make_value_info("p", kind))
    with pytest.raises(og.ModelError, match=r"Map types are not supported.*options=\{'zipmap': False\}"):
        og.augment(model, wrt="inputs")


def test_many_threads_begin_at_once() -> None:
    """No thread sees the rules while another is importing them."""
    code = """if True:
        import threading, onnx.parser, onnx_convgrad as og
        head = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[2,3] y)'
        model = onnx.parser.parse_model(head + '{ h = Softmax (x) y = Mul (h, x) }')
        done = []
        threads = [threading.Thread(target=lambda: done.append(og.augment(model, wrt="inputs"))) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert len({m.SerializeToString() for m in done}) == 1 and len(done) == 4
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sequences_of_known_members() -> None:
    """PyTorch's exporter writes `stack`, `cat` and an index of a list like this."""
    model = parsed(
        """<int64 first = {0}, int64 last = {-1}> {
        h = Tanh (x)  s = SequenceConstruct (x, h)  a = ConcatFromSequence <axis = 1, new_axis = 1> (s)
        n = SequenceEmpty ()  n1 = SequenceInsert (n, x)  n2 = SequenceInsert (n1, h, first)  n3 = SequenceInsert (n2, a)
        c = SequenceErase (n3)  b = ConcatFromSequence <axis = -1> (c)  y = SequenceAt (c, last)
        q = ReduceSumSquare <keepdims = 0> (a)  r = ReduceSumSquare <keepdims = 0> (b)  z = Add (q, r)
        }"""
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, []))
    want = 1 + 4 * X + 4 * np.tanh(X) * (1 - np.tanh(X) ** 2)
    np.testing.assert_allclose(gradient(model), want, rtol=1e-5)
    result = run(og.augment(model, wrt="inputs", seed="ones"), {"x": X})
    np.testing.assert_array_equal(result["y"], X)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 1, 5, 5], r"given shapes: .*Gemm.*mismatch"),
        ([1, 3, 4, 4], r"given shapes: .*takes 1 channels, and 'x' has 3"),
    ],
)
def test_shapes_that_the_model_does_not_take(shape: list[int], message: str) -> None:
    ones = ", ".join("1" * 32)
    model = graph_of(
        "(float[N, C, H, W] x) => (float[N, 2] y) <float[1, 1, 1, 1] k = {2},"
        f" float[16, 2] w = {{{ones}}}> {{ c = Conv (x, k) f = Flatten (c) y = Gemm (f, w) }}"
    )
    og.augment(model, input_shapes={"x": [3, 1, 4, 4]})
    with pytest.raises(og.ArgumentError, match=message):
        og.augment(model, input_shapes={"x": shape})


def test_nodes_of_one_name_are_renamed() -> None:
    """The runtime refuses two nodes of one name, and a lowering is chosen by name."""
    model = parsed("{ a = Tanh (x) b = Tanh (a) y = Exp (b) }")
    for node in model.graph.node:
        node.name = "same"
    made = og.augment(model, wrt="inputs", seed="ones")
    assert len({node.name for node in made.graph.node}) == len(made.graph.node)
    assert run(made, {"x": X})["x_grad"].shape == X.shape


def test_a_missing_shape_of_an_output_does_not_hide_a_fault() -> None:
    model = graph_of("(float[2, 3] x) => (float[] y) <float[1, 1, 1] w = {2}> { y = Conv (x, w) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(og.ModelError, match="Input tensor must have at least 3 dimensions"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(float[2, 3] x) => (float[2, 2] y) { y = MatMul (x, x) }", "Incompatible dimensions"),
        ("(float[2] x, double[2] z) => (float[2] y) { y = Add (x, z) }", "inconsistent type"),
    ],
)
def test_an_invalid_model_is_blamed_rather_than_a_rule(text: str, message: str) -> None:
    model = graph_of(text)
    with pytest.raises(og.ModelError, match=f"The model is not valid: .*{message}"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize("rows", ["2", "n"])
def test_a_branch_that_is_taken_declares_the_shape_of_the_other(rows: str) -> None:
    """PyTorch's exporter writes scatter_reduce with an If on a rank, which inference finds where sizes are unknown."""
    text = f"""(float[{rows}, 3] x) => (float[{rows}, 2] y)
        <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}, int64[1] columns = {{3}}, int64 none = {{0}}> {{
            count = Shape <start = 0, end = 1> (x)
            sizes = Concat <axis = 0> (count, columns)
            zeros = ConstantOfShape (sizes)
            shape = Shape (zeros)
            rank = Size (shape)
            scalar = Equal (rank, none)
            sum = Add (x, zeros)
            h = If (scalar) <
                then_branch = one () => (float[6] a) {{ a = Squeeze (sum) }},
                else_branch = two () => (float[6] b) {{ b = Identity (sum) }}
            >
            y = Gemm <transB = 1> (h, w)
        }}"""
    model = graph_of(text, opset=18)
    result = run(og.vjp(model, wrt=["x", "w"]), {"x": X, "y_grad": np.ones((2, 2), np.float32)})
    np.testing.assert_allclose(result["x_grad"], np.tile([5, 7, 9], (2, 1)))
    np.testing.assert_allclose(result["w_grad"], np.tile(X.sum(0), (2, 1)), rtol=1e-5)


@pytest.mark.parametrize("names", [["", "Tanh_0"], ["Tanh_1", ""], ["Tanh_2", "", ""], ["", "", "Tanh_0"]])
def test_nodes_without_a_name_get_a_free_one(names: list[str]) -> None:
    """The runtime refuses two nodes of one name; nodes with a name keep it."""
    values = ["x", *(f"h{i}" for i in range(len(names) - 1)), "y"]
    model = parsed(f"{{ {' '.join(f'{b} = Tanh ({a})' for a, b in itertools.pairwise(values))} }}")
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    result = og.augment(model, wrt="inputs", seed="ones")
    given = [node.name for node in result.graph.node]
    assert len(set(given)) == len(given)
    assert all(new == old for new, old in zip(given, names, strict=False) if old)
    assert np.isfinite(run(result, {"x": X})["x_grad"]).all()


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [
        ("(float[1,3,n] x) => (float[] y) <float[2,3,1] w = {1,2,3,4,5,6}> { v = Squeeze (x) y = Conv (v, w) }", {}),
        (
            "(float[n,1,2,k] x, float[m,1,a,b] w) => (float[p,q,r,s] y) { y = Conv (x, w) }",
            {"x": (2, 1, 2, 5), "w": (3, 1, 2, 1)},
        ),
    ],
    ids=["rank", "kernel larger than is typical"],
)
def test_unknown_shapes_of_a_convolution(graph: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Inference forgets the rank that the kernel gives its data; kernels of typical sizes would not fit."""
    model = graph_of(graph)
    result = og.augment(model, wrt="inputs", seed="ones")
    if shapes:
        feed = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        np.testing.assert_array_equal(run(result, feed)["w_grad"], np.full((3, 1, 2, 1), 10))
    else:
        assert [o.name for o in result.graph.output] == ["y", "x_grad"]


@pytest.mark.filterwarnings("ignore:The derivative is zero")
@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "nodes",
    [
        "y = Mul (x, u)",
        "q = Less (x, u) f = Cast <to = 1> (q) y = Mul (f, x)",
        "m = Max (x, u) s = Sin (m) y = Mul (s, x)",
        "q = Greater (x, u) y = Where (q, x, u)",
        "s = Shape (u) h = Expand (x, s) y = Mul (h, x)",
        "m = MatMul (x, k) n = MatMul (u, k) y = Sub (m, n)",
    ],
)
def test_sizes_of_two_names_may_differ(nodes: str, batches: tuple[int, int]) -> None:
    """One of them may be 1 when the model runs, and then it is broadcast."""

    def gradients(*sizes: object) -> dict[str, np.ndarray]:
        text = "(float[{},3] x, float[{},3] u)".format(*sizes)
        model = graph_of(f"{text} => (float[p,3] y) <float[3,3] k = {{1,2,3,4,5,6,7,8,10}}> {{ {nodes} }}")
        return run(og.augment(model, wrt="inputs", seed="ones"), feed)

    generator = np.random.default_rng(0)
    feed = {n: generator.uniform(0.1, 1, (size, 3)).astype(np.float32) for n, size in zip("xu", batches, strict=True)}
    want, got = gradients(*batches), gradients("N", "B")
    for name in ("x_grad", "u_grad"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_a_transposed_convolution_whose_kernel_is_shorter_than_its_stride() -> None:
    """ONNX Runtime omits rows at the end, where the specification of SAME_UPPER requires n times the stride."""
    model = graph_of(
        "(float[1,1,4] x, float[1,1,1] w, float[7,2] k) => (float[1,1,2] y)"
        ' { v = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2]> (x, w) y = MatMul (v, k) }'
    )
    feed = {"x": np.ones((1, 1, 4)), "w": np.full((1, 1, 1), 3), "k": np.arange(14).reshape(7, 2)}
    made = og.augment(model, wrt=["x", "v"])
    got = run(made, {**{n: a.astype(np.float32) for n, a in feed.items()}, "y_grad": np.ones((1, 1, 2), np.float32)})
    np.testing.assert_array_equal(got["v_grad"], (4 * np.arange(7) + 1).reshape(1, 1, 7))
    np.testing.assert_array_equal(got["x_grad"], 3 * (8 * np.arange(4) + 1).reshape(1, 1, 4))


@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_a_value_whose_node_is_replaced_keeps_its_name(target: str) -> None:
    model = graph_of(
        "(float[1,2,4,4] x, float[2,1,2,2] w) => (float[1,1,4,4] y)"
        " { v = ConvTranspose <pads = [0,1,1,0]> (x, w) y = Tanh (v) }"
    )
    made = og.augment(model, wrt=["v", "x"], target=target)
    found = {entry.key: entry.value for entry in made.metadata_props}["onnx_convgrad.gradients"]
    assert json.loads(found) == {"v": "v_grad", "x": "x_grad"}


@pytest.mark.parametrize("rest", [(), (4,), (3,), (4, 3)])
def test_slopes_per_channel_of_an_old_prelu(rest: tuple[int, ...]) -> None:
    """Before opset 7 a vector of slopes went along the channels, not along the last axis."""
    dims = ", ".join(map(str, (2, 3, *rest)))
    graph = f"g (float[{dims}] x, float[3] w = {{0.1, 0.2, 0.3}}) => (float[{dims}] y) {{ y = PRelu (x, w) }}"
    model = onnx.parser.parse_model(f'<ir_version: 3, opset_import: ["": 6]> {graph}')
    x = np.random.default_rng(0).standard_normal((2, 3, *rest)).astype(np.float32)
    got = run(og.augment(model, seed="ones"), {"x": x})
    slopes = np.asarray([0.1, 0.2, 0.3], np.float32).reshape(3, *[1] * len(rest))
    np.testing.assert_allclose(got["y"], np.where(x > 0, x, x * slopes), rtol=1e-6)
    others = (0, *range(2, x.ndim))
    np.testing.assert_allclose(got["w_grad"], np.minimum(x, 0).sum(others), rtol=1e-5)
