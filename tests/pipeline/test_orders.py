"""Second and third derivatives of whole graphs against nested autograd of PyTorch, in every composition of the two modes."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.pipeline.options import COMPOSITIONS
from onnx_convgrad.runtime import run
from tests.support.one_input import gradient_map, graph_of
from tests.support.training_nets import off

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Net:
    """A network `y = ...` of convolutions in ONNX's textual form, the same in PyTorch, and the shapes of its operands."""

    name: str
    body: str
    oracle: Callable[..., torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    arrays: Arrays = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.arrays.update({name: (0.7 * draw(shape)).astype(np.float32) for name, shape in self.shapes.items()})

    @property
    def model(self) -> onnx.ModelProto:
        infos = ", ".join(f"float[{','.join(map(str, a.shape))}] {name}" for name, a in self.arrays.items())
        loss = "square = Mul(y, y) loss = ReduceSum<keepdims=0>(square)"
        return graph_of(f"({infos}) => (float[] y, float loss) {{ {self.body} {loss} }}", opset=21)

    def __str__(self) -> str:
        return self.name


NETS = [
    Net(
        "1-D, dilated, asymmetric pads",
        "c = Conv<pads=[2,0], dilations=[2]>(x, w, b) y = Tanh(c)",
        lambda x, w, b: torch.tanh(F.conv1d(F.pad(x, (2, 0)), w, b, dilation=2)),
        {"x": (2, 2, 7), "w": (3, 2, 3), "b": (3,)},
    ),
    Net(
        "2-D, strided, grouped",
        "c = Conv<strides=[2,1], pads=[1,1,1,1], group=2>(x, w) t = Sigmoid(c) y = Conv(t, v)",
        lambda x, w, v: F.conv2d(torch.sigmoid(F.conv2d(x, w, stride=(2, 1), padding=1, groups=2)), v),
        {"x": (2, 4, 6, 4), "w": (4, 2, 3, 3), "v": (2, 4, 1, 1)},
    ),
    Net(
        "depthwise",
        "c = Conv<pads=[1,1,1,1], group=3>(x, w) y = Tanh(c)",
        lambda x, w: torch.tanh(F.conv2d(x, w, padding=1, groups=3)),
        {"x": (2, 3, 5, 5), "w": (3, 1, 3, 3)},
    ),
    Net(
        "2-D transposed",
        "c = ConvTranspose<strides=[2,2], pads=[1,0,0,1], output_padding=[1,0]>(x, w, b) y = Tanh(c)",
        # PyTorch has no double backward of output_padding: its rows are appended instead
        lambda x, w, b: torch.tanh(F.pad(F.conv_transpose2d(x, w, stride=2), (0, -1, -1, 1)) + b[:, None, None]),
        {"x": (2, 3, 3, 4), "w": (3, 2, 3, 3), "b": (2,)},
    ),
    Net(
        "3-D and transposed",
        "c = Conv(x, w) t = Tanh(c) y = ConvTranspose<strides=[2,1,2], group=2>(t, v)",
        lambda x, w, v: F.conv_transpose3d(torch.tanh(F.conv3d(x, w)), v, stride=(2, 1, 2), groups=2),
        {"x": (1, 2, 3, 4, 3), "w": (4, 2, 2, 2, 2), "v": (4, 1, 2, 1, 2)},
    ),
]


def doubles(arrays: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays.values()]


def random_like(arrays: Sequence[Any], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(tuple(a.shape)).astype(np.float32) for a in arrays]


@pytest.mark.parametrize("net", NETS, ids=str)
def test_hessian_vector_products_in_every_composition(net: Net) -> None:
    operands = doubles(net.arrays)
    tangents = random_like(operands, 1)
    feed = net.arrays | {f"{n}_tangent": t for n, t in zip(net.arrays, tangents, strict=True)}
    directions = tuple(torch.tensor(t, dtype=torch.float64) for t in tangents)
    want = torch.autograd.functional.hvp(lambda *x: net.oracle(*x).square().sum(), tuple(operands), directions)[1]
    for composition in COMPOSITIONS:
        got = run(og.hvp(net.model, wrt="inputs", of="loss", composition=composition), feed)
        for name, w in zip(net.arrays, want, strict=True):
            assert off(got[f"{name}_grad_tangent"], w) < 1e-5


def test_an_unknown_composition_is_refused() -> None:
    with pytest.raises(
        og.errors.ArgumentError, match=r"Unknown composition 'reverse_over_revers'\. Did you mean 'reverse_over"
    ):
        og.hvp(NETS[0].model, wrt="inputs", of="loss", composition="reverse_over_revers")


@pytest.mark.parametrize("net", NETS, ids=str)
def test_augmenting_three_times(net: Net) -> None:
    """Each order is a gradient of <u, all gradients of the order before>, in the operands and the first cotangent."""
    operands = doubles(net.arrays)
    y = net.oracle(*operands)
    seed = torch.tensor(random_like([y], 2)[0], dtype=torch.float64, requires_grad=True)
    value, model, of = (y * seed).sum(), net.model, ["y"]
    feed = net.arrays | {"y_grad": seed.detach().numpy().astype(np.float32)}
    for order in (1, 2, 3):
        sources = operands if order == 1 else [*operands, seed]
        want = torch.autograd.grad(value, sources, create_graph=True)
        model = og.augment(model, wrt=[*net.arrays, "y_grad"][: len(sources)], of=of)
        assert {n.domain for n in model.graph.node} == {""}
        of = list(gradient_map(model).values())
        got = run(model, feed)
        for name, w in zip(of, want, strict=True):
            assert off(got[name], w) < 1e-5
        weights = random_like(want, 2 + order)
        feed |= {f"{name}_grad": u for name, u in zip(of, weights, strict=True)}
        value = sum((w * torch.tensor(u, dtype=torch.float64)).sum() for w, u in zip(want, weights, strict=True))


def gan(z: torch.Tensor, real: torch.Tensor, share: torch.Tensor, g1: Any, g2: Any, d1: Any, d2: Any, d3: Any) -> Any:
    """The network of the example: the input of the critic, and its score."""
    up = F.conv_transpose2d(z, g1, stride=2, padding=1, output_padding=1)
    fake = torch.tanh(F.conv_transpose2d(up, g2, stride=2, padding=1))
    x = fake + share * (real - fake)
    hidden = F.leaky_relu(F.conv2d(x, d1, padding=1), 0.2)
    return x, F.leaky_relu(F.conv2d(hidden, d2, stride=2, padding=1), 0.2).flatten(1) @ d3


@pytest.mark.parametrize("at", ["x", "z"])
def test_gradient_penalty_against_pytorch(root: Path, at: str) -> None:
    """At `x` it is WGAN-GP's, through the critic; at `z` it passes through the generator's transposed convolutions too."""
    example = runpy.run_path(str(root / "examples" / "gradient_penalty.py"))
    model = onnx.parser.parse_model(example["GAN"])
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    draw = np.random.default_rng(0).standard_normal
    feed = {name: (0.3 * draw(shape)).astype(np.float32) for name, shape in shapes.items()}
    operands = dict(zip(feed, doubles(feed), strict=True))
    weights = ["d1", "d2", "d3", *(["g1", "g2"] if at == "z" else [])]
    x, score = gan(**operands)
    place = x if at == "x" else operands["z"]
    slope = torch.autograd.grad(score.sum(), place, create_graph=True)[0]
    loss = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    want = torch.autograd.grad(loss, [operands[name] for name in weights])
    got = run(example["gradient_penalty"](model, weights, at), feed)
    assert float(got["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    for name, w in zip(weights, want, strict=True):
        assert off(got[f"{name}_grad"], w) < 1e-5


@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_a_weight_that_is_padded(target: str) -> None:
    """The gradient by x of a transposed convolution's weight gradient: its cotangent acts as a padded weight."""
    body = "{ y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w) }"
    model = graph_of(f"(float[2,2,4,3] x, float[2,3,3,3] w) => (float[2,3,8,6] y) {body}", opset=21)
    first = og.augment(model, wrt=["w"], target=target)
    draw = np.random.default_rng(0).standard_normal
    shapes = {"y_grad": (2, 3, 8, 6), "w_grad_grad": (2, 3, 3, 3), "x": (2, 2, 4, 3), "w": (2, 3, 3, 3)}
    feed = {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}
    got = run(og.vjp(first, wrt=["x"], of=["w_grad"], target=target), feed)
    v, u, *_ = doubles(feed)
    assert off(got["x_grad"], F.conv2d(v, u, stride=2, padding=1)) < 1e-5


def test_an_operand_that_depends_on_another_is_not_counted_twice() -> None:
    """A spatial transformer: the grid of an expanded GridSample comes from the image that it samples."""
    body = "{ m = Reshape(x, shape) t = Tanh(m) grid = Mul(t, k) y = GridSample(x, grid) }"
    head = "(float[2,1,4,4] x, float[2,4,4,2] k) => (float[2,1,4,4] y) <int64[4] shape = {2, 4, 4, 1}>"
    model = graph_of(f"{head} {body}", opset=21)
    generator = np.random.default_rng(0)
    feed = {"x": generator.standard_normal((2, 1, 4, 4)), "k": generator.uniform(-1, 1, (2, 4, 4, 2))}
    feed = {name: a.astype(np.float32) for name, a in feed.items()}
    x, k = doubles(feed)
    y = F.grid_sample(x, torch.tanh(x.reshape(2, 4, 4, 1)) * k, align_corners=False)
    seed = random_like([y], 1)[0]
    want = torch.autograd.grad(y, [x, k], torch.tensor(seed, dtype=torch.float64))
    got = run(og.augment(model, wrt="inputs"), feed | {"y_grad": seed})
    for name, w in zip(feed, want, strict=True):
        assert off(got[f"{name}_grad"], w) < 1e-5


class Recurrent(torch.nn.Module):
    """The first step of a convolutional LSTM, with a state of zeros for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(7, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(torch.cat([x, x.new_zeros(x.shape[0], 4, 8, 7)], 1)))


@pytest.mark.filterwarnings("ignore")
def test_second_order_without_symbolic_shapes() -> None:
    """A Concat with zeros of unknown batch size, for which ONNX infers a size without a name."""
    torch.manual_seed(0)
    net, buffer = Recurrent(), io.BytesIO()
    x = torch.randn(2, 3, 8, 7, requires_grad=True)
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}}}
    torch.onnx.export(net, (x,), buffer, dynamo=False, opset_version=18, **names)
    first = og.vjp(onnx.load_from_string(buffer.getvalue()), wrt=["x"])
    text = "(float[a, b, c, d] slope) => (float loss) { loss = ReduceSumSquare <keepdims = 0> (slope) }"
    both = onnx.compose.merge_models(first, graph_of(text, opset=21), io_map=[("x_grad", "slope")])
    y = net(x)
    seed = torch.randn_like(y)
    (slope,) = torch.autograd.grad(y, x, seed, create_graph=True)
    want = torch.autograd.grad(slope.square().sum(), net.conv.weight)[0]
    feed = {"x": x.detach().numpy(), "y_grad": seed.numpy()}
    got = run(og.augment(both, wrt=["conv.weight"], of="loss"), feed)
    assert off(got["conv.weight_grad"], want) < 1e-4
