"""Training programs in bfloat16, which only CUDA multiplies: their operators, and results of ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.cuda_kernels import lacks
from tests.support.families import FAMILIES, exported
from tests.support.training_nets import build, parsed


@pytest.mark.parametrize("name", ["transformer", "convnext", "resnet_basic"])
def test_cuda_has_every_kernel(name: str) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    proto = exported(family, dynamo=False, training=True)
    program = build(proto, loss="mse", target="cuda", precision="bfloat16")
    step = onnx.shape_inference.infer_shapes(program.step)
    assert [str(lack) for lack in lacks(step) if not lack.arithmetic] == []
    types = {v.name: v.type.tensor_type.elem_type for v in step.graph.value_info}
    narrow = [n.op_type for n in step.graph.node if types.get(n.output[0]) == TensorProto.BFLOAT16]
    assert {"MatMul", "Gemm"} & set(narrow)
    stored = {t.name: t.data_type for t in step.graph.initializer}
    assert all(stored[p.name] == TensorProto.FLOAT for p in program.manifest.parameters)
    assert not {"loss_scale"} & {s.slot for s in program.manifest.state}


def test_gradients_have_the_digits_of_bfloat16() -> None:
    rng = np.random.default_rng(0)
    shapes = {"a.w": (6, 16), "a.b": (16,), "b.w": (16, 4), "b.b": (4,)}
    stored = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    text = """(float[N,6] x) => (float[N,4] y) {
        [a] h = Gemm (x, "a.w", "a.b")  [r] r = Relu (h)  [b] y = Gemm (r, "b.w", "b.b")
    }"""
    model = parsed(text, 21, **stored)
    feed = {"x": rng.normal(size=(8, 6)).astype(np.float32), "target": rng.normal(size=(8, 4)).astype(np.float32)}
    found = {}
    for precision in ("float32", "bfloat16"):
        graph = build(model, loss="mse", target="cuda", precision=precision).gradients
        names = [output.name for output in graph.graph.output]
        results = ReferenceEvaluator(graph).run(names, {**stored, **feed})
        found[precision] = dict(zip(names, map(np.asarray, results), strict=True))
    assert {"a.w_grad", "b.b_grad", "loss"} <= set(found["float32"])
    for name, want in found["float32"].items():
        got = found["bfloat16"][name]
        assert got.dtype == np.float32
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-5 < error < 2**-7, name  # eight bits, and not more


def test_other_targets_are_refused() -> None:
    with pytest.raises(og.ArgumentError, match=r"needs target='cuda': other providers have no bfloat16 products"):
        build(precision="bfloat16")
    with pytest.raises(og.ArgumentError, match=r"loss_scale is for precision='float16'"):
        build(target="cuda", precision="bfloat16", loss_scale=og.optim.LossScale())
