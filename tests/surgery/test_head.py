"""Replacing the last layer: in files of every style, what follows it fits, and everything else stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError, ConvGradError, ModelError
from onnx_convgrad.runtime import run

RNG = np.random.default_rng(0)


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model(text: str, *, constants: bool = False, **stored: np.ndarray) -> onnx.ModelProto:
    m = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    for name, array in stored.items():
        if constants:
            m.graph.node.insert(0, helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            m.graph.initializer.append(numpy_helper.from_array(array, name))
    return m


IMAGE, ROWS, FRAMES = rand(2, 3, 8, 8), rand(2, 6), rand(2, 5, 6)
CONV = "h = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, c) r = Relu(h)"
POOLED = f"{CONV} g = GlobalAveragePool(r) f = Flatten(g)"
C, W, B = rand(6, 3, 3, 3), rand(6, 4), rand(4)

STYLES: dict[str, tuple[onnx.ModelProto, np.ndarray, str]] = {
    "gemm": (model(f"(float[N,3,8,8] x) => (float[N,4] y) {{ {POOLED} z = Gemm(f, w, b) y = Softmax(z) }}", c=C, w=W, b=B),
             IMAGE, "w"),
    "gemm-transposed": (model(f"(float[N,3,8,8] x) => (float[N,4] y) {{ {POOLED} z = Gemm<transB=1>(f, w, b) "
                              "y = LogSoftmax(z) }", c=C, w=W.T.copy(), b=B), IMAGE, "w"),
    "matmul-add": (model("(float[N,6] x) => (float[N,4] y) { m = MatMul(x, w) z = Add(m, b) y = Softmax(z) }", w=W, b=B),
                   ROWS, "w"),
    "bias-first": (model("(float[N,6] x) => (float[N,4] y) { m = MatMul(x, w) z = Add(b, m) y = Sigmoid(z) }", w=W, b=B),
                   ROWS, "w"),
    "transposed-weight": (model("(float[N,6] x) => (float[N,4] y) { t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }",
                                w=W.T.copy()), ROWS, "w"),
    "constants": (model("(float[N,6] x) => (float[N,4] y) { m = MatMul(x, w) z = Add(m, b) y = Softmax(z) }",
                        constants=True, w=W, b=B), ROWS, "w"),
    "squeezenet": (model(f"(float[N,3,8,8] x) => (float[N,4] y) {{ {CONV} k = Conv(r, w, b) q = Relu(k) "
                         "p = GlobalAveragePool(q) y = Flatten(p) }", c=C, w=W.T.reshape(4, 6, 1, 1).copy(), b=B),
                   IMAGE, "w"),
    "conv-literal-reshape": (model(f"(float[2,3,8,8] x) => (float[2,4] y) {{ {CONV} p = GlobalAveragePool(r) "
                                   "k = Conv(p, w, b) q = Reshape(k, s) y = Softmax(q) }", c=C,
                                   w=W.T.reshape(4, 6, 1, 1).copy(), b=B, s=np.array([2, 4])), IMAGE, "w"),
    "nhwc": (model("(float[N,8,8,3] x) => (float[N,4] y) { t = Transpose<perm=[0,3,1,2]>(x) h = Conv(t, c) r = Relu(h) "
                   "u = Transpose<perm=[0,2,3,1]>(r) p = ReduceMean<axes=[1,2], keepdims=0>(u) m = MatMul(p, w) "
                   "z = Add(m, b) y = Softmax(z) }", c=C, w=W, b=B), IMAGE.transpose(0, 2, 3, 1).copy(), "w"),
    "nhwc-conv": (model("(float[N,8,8,3] x) => (float[N,4] y) { t = Transpose<perm=[0,3,1,2]>(x) h = Conv(t, c) "
                        "k = Conv(h, w) a = Add(k, b) u = Transpose<perm=[0,2,3,1]>(a) "
                        "p = ReduceMean<axes=[1,2]>(u) q = Squeeze(p, s) y = Softmax(q) }", c=C,
                        w=W.T.reshape(4, 6, 1, 1).copy(), b=B.reshape(1, 4, 1, 1), s=np.array([1, 2])),
                  IMAGE.transpose(0, 2, 3, 1).copy(), "w"),
    "joined-target": (model(f"(float[N,3,8,8] x) => (float[N,4] y) {{ {CONV} p = GlobalAveragePool(r) k = Conv(p, w) "
                            "n = Shape<start=0, end=1>(x) s = Concat<axis=0>(n, four) y = Reshape(k, s) }", c=C,
                            w=W.T.reshape(4, 6, 1, 1).copy(), four=np.array([4])), IMAGE, "w"),
    "ctc": (model("(float[N,T,6] x) => (float[N,T,4] y) { m = MatMul(x, w) z = Add(m, b) y = Softmax<axis=2>(z) }",
                  w=W, b=B), FRAMES, "w"),
    "ctc-time-first": (model("(float[2,5,6] x) => (float[5,2,4] y) { t = Transpose<perm=[1,0,2]>(x) f = Reshape(t, s) "
                             "z = Gemm(f, w, b) q = Reshape(z, u) y = LogSoftmax<axis=2>(q) }", w=W, b=B,
                             s=np.array([-1, 6]), u=np.array([5, 2, 4])), FRAMES, "w"),
    "transposed-conv": (model(f"(float[N,3,8,8] x) => (float[N,4] y) {{ {CONV} k = ConvTranspose(r, w, b) "
                              "p = GlobalAveragePool(k) y = Flatten(p) }", c=C, w=W.reshape(6, 4, 1, 1), b=B), IMAGE, "w"),
    "einsum": (model('(float[N,6] x) => (float[N,4] y) { z = Einsum<equation="nk,ok->no">(x, w) y = Add(z, b) }',
                     w=W.T.copy(), b=B), ROWS, "w"),
    "two-outputs": (model("(float[N,6] x) => (float[N,4] z, float[N,4] y, int64[N] best) { z = Gemm(x, w, b) y = Softmax(z) "
                          "best = ArgMax<axis=1, keepdims=0>(y) }", w=W, b=B), ROWS, "w"),
    "written-softmax": (model("(float[N,6] x) => (float[N,4] y) { z = Gemm(x, w, b) m = ReduceMax<axes=[1]>(z) "
                              "d = Sub(z, m) e = Exp(d) "
                              "s = ReduceSum(e, one) y = Div(e, s) }", w=W, b=B, one=np.array([1])), ROWS, "w"),
}  # fmt: skip


def stored(m: onnx.ModelProto) -> dict[str, np.ndarray]:
    tensors = {i.name: numpy_helper.to_array(i) for i in m.graph.initializer}
    constants = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in m.graph.node if n.op_type == "Constant"}
    return tensors | constants


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("classes", [7, 4, 2])
def test_a_new_head_in_every_style(style: str, classes: int) -> None:
    before, x, weight = STYLES[style]
    kept = before.SerializeToString()
    after = og.transforms.replace_head(before, classes, seed=3)
    assert before.SerializeToString() == kept
    onnx.checker.check_model(after, full_check=True)
    want, got = run(before, {"x": x}), run(after, {"x": x})
    for value, output in zip(after.graph.output, before.graph.output, strict=True):
        name = value.name
        sizes, old_sizes = ([d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (value, output))
        assert sizes == [classes if size == 4 else size for size in old_sizes]
        assert got[name].shape == tuple(classes if d == 4 and i else d for i, d in enumerate(want[name].shape))
    old, new = stored(before), stored(after)
    assert (new[weight].ndim, new[weight].size) == (old[weight].ndim, old[weight].size // 4 * classes)
    bound = 1 / np.sqrt(6)
    assert np.abs(new[weight]).max() <= bound and new[weight].std() == pytest.approx(bound / np.sqrt(3), rel=0.35)
    if "c" in old:
        np.testing.assert_array_equal(old["c"], new["c"])
    same = og.transforms.replace_head(before, classes, seed=3)
    np.testing.assert_array_equal(stored(same)[weight], new[weight])
    assert not np.array_equal(stored(og.transforms.replace_head(before, classes, seed=4))[weight], new[weight])


def detector(opset: int) -> onnx.ModelProto:
    """Boxes and scores of two scales, joined and parted again, as in YOLOv8's files."""
    parted = "Split<axis=1>(all, parts)" if opset > 12 else "Split<axis=1, split=[2, 4]>(all)"
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> d (float[N,3,8,8] x) => (float[N,6,K] y) {{
        h = Conv<kernel_shape=[1,1]>(x, c) p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)
        b1 = Conv(h, w1) k1 = Conv(h, v1, a) j1 = Concat<axis=1>(b1, k1) n = Shape(j1) first = Gather(n, zero)
        size = Concat<axis=0>(first, middle, rest) f1 = Reshape(j1, size)
        b2 = Conv(p, w2) k2 = Conv(p, v2, e) j2 = Concat<axis=1>(b2, k2) f2 = Reshape(j2, size)
        all = Concat<axis=2>(f1, f2) boxes, scores = {parted}
        twice = Add(boxes, boxes) s = Sigmoid(scores) y = Concat<axis=1>(twice, s) }}"""
    m = onnx.parser.parse_model(text)
    sizes = {"zero": np.array([0]), "middle": np.array([6]), "rest": np.array([-1]), "parts": np.array([2, 4])}
    weights = {"c": rand(5, 3, 1, 1), **{f"w{i}": rand(2, 5, 1, 1) for i in (1, 2)}}
    weights |= {f"v{i}": rand(4, 5, 1, 1) for i in (1, 2)} | {"a": rand(4), "e": rand(4)}
    stored = {k: v for k, v in (sizes | weights).items() if k != "parts" or opset > 12}
    m.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in stored.items())
    return m


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("classes", [7, 4, 2])
def test_the_layers_of_a_detector(opset: int, classes: int) -> None:
    before = detector(opset)
    after = og.transforms.replace_head(before, classes, head=["v1", "k2"])
    onnx.checker.check_model(after, full_check=True)
    assert {i.name for i in after.graph.initializer} == {i for n in after.graph.node for i in n.input} & {
        i.name for i in after.graph.initializer
    }
    want, got = (run(m, {"x": IMAGE})["y"] for m in (before, after))
    assert got.shape == (len(IMAGE), 2 + classes, want.shape[2])
    np.testing.assert_array_equal(got[:, :2], want[:, :2])
    new, old = stored(after), stored(before)
    assert new["v1"].shape == new["v2"].shape == (classes, 5, 1, 1) and new["a"].shape == (classes,)
    assert not any(np.array_equal(new[name], old[name]) for name in ("v1", "v2", "a", "e"))
    assert np.array_equal(new["w1"], old["w1"]) and not np.array_equal(new["v1"], new["v2"])


@pytest.mark.parametrize(("head", "message"), [
    (["v1"], "behind it is node 'all' .*may hold a value for each class"),
    (["v1", "w2"], "different numbers of classes: 'v1' has 4, 'w2' has 2"),
])  # fmt: skip
def test_layers_that_do_not_belong_together(head: list[str], message: str) -> None:
    with pytest.raises(ConvGradError, match=message):
        og.transforms.replace_head(detector(17), 3, head=head)


def test_classes_that_are_parted_or_added_to_a_value_for_each() -> None:
    model = detector(17)
    model.graph.initializer.remove(next(i for i in model.graph.initializer if i.name == "parts"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 3]), "parts"))
    with pytest.raises(ConvGradError, match=r"behind it is node 'boxes' \(Split\), and it parts the classes"):
        og.transforms.replace_head(model, 3, head=["v1", "v2"])


def test_the_bias_is_drawn_anew_and_a_shared_one_stays() -> None:
    text = "(float[N,4] x) => (float[N,4] y) { h = Gemm(x, v, b) y = Gemm(h, w, b) }"
    before = model(text, v=rand(4, 4), w=rand(4, 4), b=B)
    after = og.transforms.replace_head(before, 9)
    assert {k: v.shape for k, v in stored(after).items()} == {"v": (4, 4), "w": (4, 9), "b": (4,), "b_head": (9,)}
    np.testing.assert_array_equal(stored(after)["b"], B)


def test_labels_are_replaced_or_removed(tmp_path: Path) -> None:
    before, _, _ = STYLES["gemm"]
    named = og.transforms.replace_head(before, 2, labels=["cat", "dog"])
    assert [(p.key, p.value) for p in named.metadata_props] == [("onnx_convgrad.labels", '["cat", "dog"]')]
    onnx.save(named, tmp_path / "named.onnx")
    assert og.transforms.replace_head(tmp_path / "named.onnx", 2).metadata_props == named.metadata_props
    assert not og.transforms.replace_head(named, 3).metadata_props
    with pytest.raises(ArgumentError, match="There are 1 labels for 3 classes"):
        og.transforms.replace_head(named, 3, labels=["cat"])


def test_the_names_of_ultralytics_are_replaced_or_removed() -> None:
    before = onnx.ModelProto.FromString(STYLES["gemm"][0].SerializeToString())
    before.metadata_props.add(key="names", value="{0: 'a', 1: 'b', 2: 'c', 3: 'd'}")

    def names(*arguments: Any, **options: Any) -> str | None:
        found = og.transforms.replace_head(before, *arguments, **options)
        return {p.key: p.value for p in found.metadata_props}.get("names")

    assert names(2, labels=["cat", "dog"]) == "{0: 'cat', 1: 'dog'}"
    assert names(2) is None and names(4) == before.metadata_props[0].value
    before.metadata_props[0].value = "of another tool"
    assert names(2) == "of another tool"


TWO = "(float[N,6] x) => (float[N,4] y, float[N,3] aux) { y = Gemm(x, w, b) aux = MatMul(x, v) }"


def test_an_ambiguous_head_is_named() -> None:
    before = model(TWO, w=W, b=B, v=rand(6, 3))
    with pytest.raises(ArgumentError, match=r"come from 2 layers.*Name one with head= .*'w'.*'v'|'v'.*'w'"):
        og.transforms.replace_head(before, 5)
    for name in ("v", "aux"):
        after = run(og.transforms.replace_head(before, 5, head=name), {"x": ROWS})
        assert (after["aux"].shape, after["y"].shape) == ((2, 5), (2, 4))
    with pytest.raises(ArgumentError, match=r"Unknown layer in head: 'auxx'. Did you mean 'aux'"):
        og.transforms.replace_head(before, 5, head="auxx")


REFUSED = [
    (model("(int64[N,T] i) => (float[N,T,4] y) { h = Gather(w, i) t = Transpose<perm=[1,0]>(w) y = MatMul(h, t) }",
           w=W.T.copy()), "its weight is shared; 'h' .Gather. reads it too"),
    (model("(float[N,6] x) => (float[N,4] y) { q = DequantizeLinear(w, s) y = MatMul(x, q) }",
           w=np.ones((6, 4), np.int8), s=np.float32(0.1)), "its weight is quantized"),
    (model("(float[N,6] x) => (float[N,4] y) { z = Gemm(x, w) y = BatchNormalization(z, b, b, b, b) }", w=W, b=B),
     "The last layer cannot be found"),
    (model("(float[N,6] x) => (float[N,4] y) { z = Gemm(x, w) y = Mul(z, b) }", w=W, b=B),
     "'b' may hold a value for each class"),
    (model("(float[N,3,8,8] x) => (float[N,256] y) { k = Conv(x, w) y = Flatten(k) }", w=rand(4, 3, 1, 1)),
     "may mix the classes with another axis"),
    (model("(float[N,6] x) => (float[N,6] y) { y = Relu(x) }"), "no node has weights"),
    (model("(float[N,6] x, float[6,4] w) => (float[N,4] y) { y = MatMul(x, w) }"), "not a layer with stored weights"),
    (model("(float[N,6] x) => (float[N,2] y) { z = Gemm(x, w) y = Slice(z, o, t, o) }", w=W, o=np.array([1]),
           t=np.array([3])), "'y' .Slice., and it picks some of the classes"),
    (model("(float[N,6] x) => (float[N,2] y) { z = Gemm(x, w) y = Gather<axis=1>(z, o) }", w=W, o=np.array([1, 2])),
     "'y' .Gather., and it picks some of the classes"),
    (model("(float[N,6] x) => (float[N,4] y, int64[N,4] i) { z = Gemm(x, w) y, i = TopK(z, k) }", w=W, k=np.array([4])),
     "'y' .TopK., and it may mix the classes"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_what_cannot_be_replaced_is_refused(before: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message) as problem:
        og.transforms.replace_head(before, 5)
    assert problem.value.hint


@pytest.mark.parametrize(("options", "message"), [
    ({"classes": 0}, "classes must be at least 1"),
    ({"classes": "5"}, "classes must be a whole number"),
    ({"classes": 5, "seed": -1}, "seed must be at least 0"),
    ({"classes": 5, "labels": [1, 2, 3, 4, 5]}, "labels takes a name or several"),
    ({"classes": 5, "head": 3}, "head takes a name or several"),
])  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvGradError, match=message):
        og.transforms.replace_head(STYLES["gemm"][0], **options)


def test_an_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="replace_head: got an unexpected keyword argument 'heads'"):
        og.transforms.replace_head(STYLES["gemm"][0], 5, heads="w")  # type: ignore[call-arg]
