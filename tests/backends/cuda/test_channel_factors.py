"""Factors per channel of a cotangent move into the kernels of a training step, where they save a pass."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of

BODY = """{
    [conv] c = Conv <pads = [1, 1, 1, 1], group = %d> (x, w)
    [norm] n, m_next, v_next = BatchNormalization <training_mode = 1> (c, s, b, m, v)
    [square] y = Mul (n, n)
}"""


def _model(groups: int = 1) -> onnx.ModelProto:
    operands = f"float[4, 2, 6, 6] x, float[6, {2 // groups}, 3, 3] w, float[6] s, float[6] b, float[6] m, float[6] v"
    return graph_of(f"({operands}) => (float[4, 6, 6, 6] y) {BODY % groups}", opset=21)


def _feed(groups: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 2, 6, 6), "w": (6, 2 // groups, 3, 3), "s": (6,), "b": (6,)}
    feed = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    feed |= {"m": np.zeros(6), "v": np.ones(6)}
    return {name: array.astype(np.float32) for name, array in feed.items()}


def _images(model: onnx.ModelProto, op_type: str) -> int:
    """Number of results of an operator that are as large as the convolution's."""
    inferred = onnx.shape_inference.infer_shapes(model)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    return sum(n.op_type == op_type and sizes.get(n.output[0]) == [4, 6, 6, 6] for n in model.graph.node)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_gradients_equal_those_of_torch(groups: int, target: str) -> None:
    feed, seed = _feed(groups), np.random.default_rng(1).standard_normal((4, 6, 6, 6)).astype(np.float32)
    model = og.vjp(_model(groups), wrt=["x", "w", "s", "b"], target=target)
    got = run(model, {**feed, "y_grad": seed})

    def function(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.nn.functional.conv2d(x, w, padding=1, groups=groups)
        return torch.nn.functional.batch_norm(c, None, None, s, b, training=True).square()

    check_by_torch(got, function, seed=seed, rtol=1e-4, atol=1e-4, **{name: feed[name] for name in "xwsb"})


def test_the_cpu_multiplies_the_images() -> None:
    assert _images(og.vjp(_model(), wrt=["x", "w"]), "Mul") > _images(
        og.vjp(_model(), wrt=["x", "w"], target="cuda"), "Mul"
    )


def test_one_pass_over_the_images_is_saved() -> None:
    """If the kernel is an input, the factor multiplies it; a constant kernel stays, and the images are multiplied."""
    given = og.vjp(_model(), wrt=["x", "w"], target="cuda")
    constant = _model()
    (kernel,) = (v for v in constant.graph.input if v.name == "w")
    constant.graph.input.remove(kernel)
    constant.graph.initializer.append(onnx.numpy_helper.from_array(_feed()["w"], "w"))
    kept = og.vjp(constant, wrt=["x", "w"], target="cuda")
    assert _images(given, "Mul") == _images(kept, "Mul") - 1
    feed = _feed()
    seed = {"y_grad": np.ones((4, 6, 6, 6), np.float32)}
    want = run(kept, {k: v for k, v in feed.items() if k != "w"} | seed)
    for name, value in run(given, feed | seed).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-4)
