"""The models that the fuzzer starts from: ONNX's own tests of every operator, and small networks in ONNX's text form."""

from __future__ import annotations

import functools
import random
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import onnx_convgrad as og

Arrays = Mapping[str, np.ndarray]
EXAMPLE = Path(__file__).parents[2] / "examples" / "models" / "digits_cnn.onnx"


@dataclass(frozen=True, slots=True)
class Seed:
    """A serialized model, and operands for which it runs, where known."""

    name: str
    data: bytes
    feeds: Arrays = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        return onnx.load_from_string(self.data)


NETWORKS = {
    "convs": """(float[N,2,H,W] x) => (float[N,3] y) <float[4,2,3,3] w, float[4] b, float[3,4] v> {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)  r = Relu (c)  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        g = GlobalAveragePool (p)  f = Flatten (g)  y = Gemm <transB = 1> (f, v) }""",
    "norm": """(float[4,2,6] x) => (float[4,2,6] y, float[4,2,6] z)
        <float[2] s, float[2] b, float[2] m, float[2] a, float[6] q> {
        n = BatchNormalization (x, s, b, m, a)  d, k = Dropout (n)  z = Sigmoid (d)
        y = LayerNormalization <axis = -1> (z, q)  }""",
    "attention": """(float[B,5,4] x) => (float[B,5,4] y) <float[4,4] k, float[4,4] q> {
        a = MatMul (x, k)  t = Transpose <perm = [0, 2, 1]> (a)  b = MatMul (x, q)  s = MatMul (b, t)
        p = Softmax <axis = -1> (s)  r = MatMul (p, x)  y = Add (r, x) }""",
    "functions": """(float[2,3] x) => (float[2,3] y) <float[3] w> {
        a = f.Act <alpha = 0.5> (x)  b = Mul (a, w)  y = f.Two (b) }
        <domain: "f", opset_import: ["": 17, "f": 1]> Act <alpha> (u) => (v) { v = LeakyRelu <alpha: float = @alpha> (u) }
        <domain: "f", opset_import: ["": 17, "f": 1]> Two (u) => (v) { t = f.Act <alpha = 2.0> (u)  v = Tanh (t) }""",
    "branch": """(float[2,3] x, bool c) => (float[2,3] y) <float[3] w> {
        t = If (c) <then_branch = g () => (float[2,3] p) { p = Mul (x, w) },
                    else_branch = h () => (float[2,3] q) { r = Tanh (x)  q = Add (r, w) }>  y = Exp (t) }""",
    "loop": """(float[2,3] x, int64 n) => (float[2,3] y, float[K,2,3] ys) <float[3] w, bool c = {1}> {
        y, ys = Loop (n, c, x) <body = b (int64 i, bool k, float[2,3] s) => (bool o, float[2,3] t, float[2,3] u)
            { o = Identity (k)  m = Mul (s, w)  t = Sin (m)  u = Neg (t) }> }""",
    "scan": """(float[3] s, float[4,3] x) => (float[3] e, float[4,3] y) <float[3] w> {
        e, y = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] v) => (float[3] d, float[3] z)
            { m = Mul (a, w)  d = Add (m, v)  z = Identity (d) }> (s, x) }""",
    "lstm": """(float[5,2,3] x) => (float[5,1,2,4] y) <float[1,16,3] w, float[1,16,4] r> {
        y, h, c = LSTM <hidden_size = 4> (x, w, r) }""",
    "quantized": """(float[1,2,6,6] x) => (float[1,3,4,4] y)
        <float s = {0.1}, uint8 z = {128}, int8[3,2,3,3] w, float t = {0.05}, int8 o = {0}> {
        q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  k = DequantizeLinear (w, t, o)  c = Conv (d, k)
        y = Relu (c) }""",
    "sizes": """(float[N,2,6] x) => (float[N,F] y, float[N,2,3] z) <int64[2] to = {0, -1}, int64 one = {1}> {
        h = Shape (x)  i = Gather (h, one)  r = Reshape (x, to)  y = Abs (r)
        a, b = Split <axis = 2> (x)  m = Greater (a, b)  z = Where (m, a, b) }""",
    "sequence": """(float[4,3] x) => (float[4,3] y) {
        s = SplitToSequence <axis = 0, keepdims = 1> (x)  y = ConcatFromSequence <axis = 0> (s) }""",
    "gradient": """(float[2,3] x, float[3,2] w) => (float[2,2] y, float[2,3] dx, float[3,2] dw) {
        a = MatMul (x, w)  y = Tanh (a)  dx, dw = ai.onnx.preview.training.Gradient <xs = ["x", "w"], y = "y"> (x, w) }""",
}


def parsed(text: str) -> onnx.ModelProto:
    """The network; weights without values in the text are drawn."""
    head = '<ir_version: 9, opset_import: ["": 17, "f": 1, "ai.onnx.preview.training": 1]> g '
    model, draw = onnx.parser.parse_model(head + text), np.random.default_rng(0)
    for value in model.graph.value_info:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array((draw.random(shape) * 4).astype(kind), value.name))
    del model.graph.value_info[:]
    return model


def networks() -> list[Seed]:
    """Small networks, the example, and graphs that this package made of them."""
    models = {name: parsed(text) for name, text in NETWORKS.items()}
    models["example"] = onnx.load(EXAMPLE)
    models["gradients"] = og.augment(models["convs"], wrt="all")
    models["loop gradients"] = og.augment(models["scan"], wrt="all")
    models["per sample"] = og.augment(models["convs"], per_sample=True)
    program = og.build_training(models["convs"], loss="mse", optimizer=og.optim.Adam(1e-3))
    models["step"], models["update"] = program.step, program.update
    feeds = {"c": np.array(True), "n": np.array(3)}
    return [Seed(name, model.SerializeToString(), feeds) for name, model in models.items()]


def operators() -> list[Seed]:
    """ONNX's own tests of its operators."""
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(0)  # noqa: NPY002 - the tests draw from it
    seeds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in collect_testcases(None):
            given = case.data_sets[0][0] if case.data_sets else ()
            names = [i.name for i in case.model.graph.input]
            feeds = {k: v for k, v in zip(names, given, strict=False) if isinstance(v, np.ndarray)}
            seeds.append(Seed(case.name, case.model.SerializeToString(), feeds))
    return seeds


class Seeds:
    """All seeds; each operator is drawn as often as any other, however many tests it has."""

    def __init__(self) -> None:
        self.networks = networks()
        self.groups: dict[str, list[Seed]] = defaultdict(list)
        for seed in operators():
            nodes = seed.model().graph.node
            self.groups[f"{nodes[0].op_type} {'expanded' in seed.name}" if nodes else ""].append(seed)
        self.order: Sequence[str] = sorted(self.groups)

    def draw(self, r: random.Random) -> Seed:
        if r.random() < 0.25:
            return r.choice(self.networks)
        return r.choice(self.groups[r.choice(self.order)])


@functools.cache
def all_seeds() -> Seeds:
    return Seeds()
