"""A convolution and a frozen BatchNormalization: one convolution in the backward pass, still fused in the forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.pipeline.options import COMPOSITIONS, Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, Random, rand
from tests.frontend.opset.test_converters_fused import LEVELS, activated, optimized
from tests.support.operators import rule_test, text_model


def _case(attributes: str, x: Random, w: Random, *, bias: bool = True, **options: object) -> Case:
    channels = w.shape[0]
    operands = [x, w, *([rand(channels)] if bias else []), *[rand(channels)] * 3, rand(channels, low=0.5)]
    names = [f"x{i}" for i in range(len(operands))]
    conv, norm = names[: 2 + bias], names[2 + bias :]
    body = f"h = Conv<{attributes}>({', '.join(conv)}) y0 = BatchNormalization<epsilon=0.01>(h, {', '.join(norm)})"
    return Case("local::ConvNorm", operands, body=body, name=attributes, **options)


IMAGE, SMALL = rand(2, 2, 5, 6), rand(3, 2, 2, 3)
CASES = [
    _case("pads=[1,0,0,1], strides=[2,1]", IMAGE, SMALL),
    _case('auto_pad="SAME_UPPER", strides=[2,2]', IMAGE, SMALL, bias=False),
    _case("pads=[0,1,0,1]", IMAGE, SMALL, wrt=[0, 1], constants=[1, 3, 4, 5, 6]),
    _case("pads=[0,1,0,1]", IMAGE, SMALL, wrt=[3, 6], dynamic=False),
    # statistics that are copies of the parameters, as exporters write equal initializers
    Case(
        "local::ConvNorm",
        [IMAGE, SMALL, rand(3, low=0.5), rand(3)],
        body="h = Conv<strides=[1,1]>(x0, x1) m = Identity(x3) v = Identity(x2) y0 = BatchNormalization(h, x2, x3, m, v)",
        name="shared",
    ),
    _case("dilations=[2]", rand(2, 3, 9), rand(2, 3, 3)),
    _case("pads=[1,1]", rand(2, 2, 8), rand(3, 2, 3), dtype=np.float16),
]

test_rule = rule_test(CASES)


SIZES = {"w": (8, 4, 3, 3), "s": (8,), "b": (8,), "m": (8,), "v": (8,)}


def network(*, mean: float = 0.0, extra: str = "") -> onnx.ModelProto:
    """Conv, BatchNormalization and Relu, with statistics near those of the data."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.uniform(0.5, 1, size).astype(np.float32) for name, size in SIZES.items()}
    arrays["m"] += np.float32(mean)
    model = text_model(
        "(float[2,8,12,12] x) => (float[2,8,12,12] y) {"
        f" h = Conv<pads=[1,1,1,1], group=2>(x, w) n = BatchNormalization(h, s, b, m, v) {extra} y = Relu(n) }}",
        opset=17,
    )
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items())
    return model


def readers(model: onnx.ModelProto, value: str) -> list[str]:
    return [node.op_type for node in model.graph.node if value in node.input]


@pytest.mark.parametrize("level", LEVELS)
def test_the_forward_part_is_fused_as_without_gradients(level: str, tmp_path: Path) -> None:
    plain, augmented = network(), og.augment(network())
    assert readers(augmented, "h") == ["BatchNormalization"]
    want = activated(optimized(plain, tmp_path, level))
    assert want == {"Relu of 3": 1}  # the added bias is that of the fused BatchNormalization
    assert activated(optimized(augmented, tmp_path, level)) == want


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ({"target": og.Target(lowering="exact")}, ""),
        ({"wrt": ["s"]}, ""),  # a whole weight gradient for a vector would cost more
        ({"wrt": ["w", "s", "h"]}, ""),
        ({"wrt": ["w", "s"], "of": ["y", "h"]}, ""),
        ({}, "other = Neg(h)"),
    ],
    ids=str,
)
def test_a_used_value_between_is_kept(arguments: dict[str, object], extra: str) -> None:
    model = network(extra=extra)
    if extra:
        model.graph.output.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [2, 8, 12, 12]))
    assert len(readers(og.augment(model, **arguments), "h")) > 1 or "Neg" in extra


@pytest.mark.parametrize(("mean", "bound"), [(0.0, 1e-5), (30.0, 1e-4)])
def test_a_large_mean_costs_few_digits(mean: float, bound: float) -> None:
    """The error grows with the ratio of mean and deviation, because x is not centered; `lowering="exact"` centers it."""
    model = network(mean=mean)
    arrays = {t.name: torch.tensor(numpy_helper.to_array(t), dtype=torch.float64) for t in model.graph.initializer}
    operands = {name: a.requires_grad_(name not in "mv") for name, a in arrays.items()}
    generator = np.random.default_rng(1)
    x = generator.uniform(0, 1, (2, 8, 12, 12)).astype(np.float32)
    seed = generator.standard_normal(x.shape).astype(np.float32)
    w, s, b, m, v = operands.values()
    h = torch.nn.functional.conv2d(torch.tensor(x, dtype=torch.float64), w, padding=1, groups=2)
    y = torch.nn.functional.batch_norm(h, m, v, s, b).relu()
    y.backward(torch.tensor(seed, dtype=torch.float64))
    got = run(og.augment(model, wrt=["w", "s", "b"]), {"x": x, "y_grad": seed})
    for name in ("w", "s", "b"):
        want = operands[name].grad.numpy()
        assert np.linalg.norm(got[f"{name}_grad"] - want) <= bound * np.linalg.norm(want)


def test_second_order_reports_names_of_the_model() -> None:
    """Nodes that the first walk added for a node of the model are reported under its name by the second."""
    model = network()
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["y"], ["l"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("l", onnx.TensorProto.FLOAT, []))
    made = {node.name for node in canonicalize(ir.from_proto(model)).graph}
    for composition in COMPOSITIONS:
        choices = build(model, Options(of="l", wrt=["w", "s"], composition=composition), mode="hvp").choices
        assert {choice.node for choice in choices} <= made
        assert choices
