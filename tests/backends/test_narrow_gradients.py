"""The gradient of some output channels of a weight is a smaller convolution, with the numbers of the whole one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
X, SEED = RNG.normal(size=(2, 8, 6, 6)).astype("f"), RNG.normal(size=(2, 8, 4, 4)).astype("f")


def gradient(group: int, wrt: object) -> tuple[onnx.ModelProto, np.ndarray]:
    """The gradient graph of a convolution, and the only gradient that it gives."""
    w = np.random.default_rng(1).normal(size=(8, 8 // group, 3, 3)).astype("f")
    model = graph_of(f"(float[2,8,6,6] x) => (float[2,8,4,4] y) {{ y = Conv <group = {group}> (x, w) }}", w=w)
    built = og.augment(model, wrt=wrt)
    results = run(built, {"x": X, "y_grad": SEED})
    (name,) = (name for name in results if name.startswith("w") and name.endswith("_grad"))
    return built, results[name]


def multiplications(model: onnx.ModelProto) -> int:
    """The products of all convolutions and matrix products, by their inferred shapes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    values = [*inferred.graph.value_info, *inferred.graph.output, *inferred.graph.input]
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    sizes |= {t.name: list(numpy_helper.to_array(t).shape) for t in inferred.graph.initializer}
    total = 0
    for node in inferred.graph.node:
        if node.op_type == "Conv":
            total += int(np.prod(sizes[node.output[0]]) * np.prod(sizes[node.input[1]][1:]))
        elif node.op_type == "MatMul":
            total += int(np.prod(sizes[node.output[0]]) * sizes[node.input[0]][-1])
    return total


@pytest.mark.parametrize(
    ("group", "channels"),
    [(1, slice(2, 5)), (1, slice(0, 1)), (2, slice(4, 8)), (2, slice(1, 6)), (8, slice(3, 5))],
    ids=["middle", "one", "one of two groups", "parts of groups", "depthwise"],
)
def test_the_numbers_are_those_of_the_whole_gradient(group: int, channels: slice) -> None:
    whole, part = gradient(group, "w")[1], gradient(group, {"w": channels})[1]
    np.testing.assert_allclose(part, whole[channels], rtol=1e-4, atol=1e-4)


def test_a_quarter_of_the_channels_takes_fewer_multiplications() -> None:
    forward = 2 * 8 * 4 * 4 * 8 * 9
    whole, part = (multiplications(gradient(1, wrt)[0]) - forward for wrt in ("w", {"w": slice(0, 2)}))
    assert 0 < part <= whole / 3


def quantized(group: int, *, per_channel: bool) -> onnx.ModelProto:
    """A convolution with a quantized weight, of which some numbers are out of range."""
    w = np.random.default_rng(1).normal(size=(8, 8 // group, 3, 3)).astype("f")
    scale = np.full(8, 0.01, "f") if per_channel else np.float32(0.01)
    text = f"""(float[2,8,6,6] x) => (float[2,8,4,4] y) {{
        q = QuantizeLinear <axis = 0> (w, s, z)
        d = DequantizeLinear <axis = 0> (q, s, z)
        y = Conv <group = {group}> (x, d)
    }}"""
    return graph_of(text, opset=21, w=w, s=scale, z=np.zeros(np.shape(scale), np.int8))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("group", "channels"), [(1, slice(0, 2)), (1, slice(3, 5)), (8, slice(2, 4))])
def test_gradients_through_quantizers_are_narrow_too(group: int, channels: slice, *, per_channel: bool) -> None:
    model = quantized(group, per_channel=per_channel)
    built = {str(wrt): og.augment(model, wrt=wrt) for wrt in (["w"], {"w": channels})}
    whole, part = (
        next(a for name, a in run(each, {"x": X, "y_grad": SEED}).items() if name.endswith("_grad"))
        for each in built.values()
    )
    np.testing.assert_allclose(part, whole[channels], rtol=1e-4, atol=1e-4)
    assert 0 < np.mean(part == 0) < 0.5
    taken = [multiplications(each) - 2 * 8 * 4 * 4 * 8 // group * 9 for each in built.values()]
    assert 0 < taken[1] <= taken[0] / 3


def test_training_of_quantized_channels_is_narrow() -> None:
    options = {"loss": "mse", "optimizer": og.optim.SGD(0.1), "quantization": "qat"}
    steps = [
        og.build_training(quantized(1, per_channel=True), wrt=wrt, **options).step
        for wrt in (["w"], {"w": slice(0, 2)})
    ]
    whole, part = (multiplications(step) - 2 * 8 * 4 * 4 * 8 * 9 for step in steps)
    assert 0 < part <= whole / 3
