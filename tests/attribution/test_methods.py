"""Explanations equal implementations in PyTorch that are written from the papers, for every layout and ending of a file."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from torch.nn import functional as F

from onnx_convgrad import attribution
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.runtime import run
from tests.support.classifiers import LAYER, Classifier
from tests.support.one_input import graph_of

NET = Classifier()
TOL = {"rtol": 1e-4, "atol": 2e-6}


def images(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def explained(name: str, x: torch.Tensor, file: onnx.ModelProto | None = None, **options: Any) -> dict[str, np.ndarray]:
    """Run an explanation; further inputs of the model are in `feed`."""
    feed = options.pop("feed", {})
    file = NET.file() if file is None else file
    nhwc = file.graph.input[0].type.tensor_type.shape.dim[3].dim_value == 3
    made = getattr(attribution, name)(file, **options)
    onnx.checker.check_model(made, full_check=True)
    found = run(made, {"image": (x.permute(0, 2, 3, 1) if nhwc else x).numpy(), **feed})
    if nhwc and found["attribution"].ndim == 4:
        found["attribution"] = found["attribution"].transpose(0, 3, 1, 2)
    return found


def score(x: torch.Tensor, label: torch.Tensor, net: Classifier = NET) -> torch.Tensor:
    return net(x).gather(1, label[:, None])[:, 0]


def gradient(x: torch.Tensor, label: torch.Tensor, net: Classifier = NET) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(score(x, label, net).sum(), x)[0]


def top(x: torch.Tensor) -> torch.Tensor:
    return NET(x).argmax(1)


# -- the class, the layout and the end of the file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "end", "batch", "product"),
    [
        ("NCHW", "", "N", "Gemm"),
        ("NHWC", "Softmax", "1", "MatMul"),
        ("NCHW", "Softmax", "1", "Gemm"),
        ("NHWC", "", "N", "MatMul"),
    ],
)
@pytest.mark.parametrize("name", ["saliency", "grad_cam"])
def test_every_kind_of_file_gives_the_same(name: str, layout: str, end: str, batch: str, product: str) -> None:
    x = images(1 if batch == "1" else 3)
    expected = explained(name, x)
    found = explained(name, x, NET.file(batch=batch, layout=layout, end=end, product=product))
    assert_allclose(found["attribution"], expected["attribution"], **TOL)
    assert found["explained_label"].tolist() == top(x).tolist()


def test_the_class_is_a_number_or_an_input() -> None:
    x, label = images(), torch.tensor([4, 0, 2])
    expected = gradient(x, label)
    found = explained("saliency", x, label="input", absolute=False, feed={"label": label.numpy()})
    assert_allclose(found["attribution"], expected, **TOL)
    found = explained("saliency", x, label=2)
    assert_allclose(found["attribution"], gradient(x, torch.full((3,), 2)).abs(), **TOL)
    assert found["explained_label"].tolist() == [2, 2, 2]


def test_a_named_value_is_explained_as_it_is() -> None:
    """Named explicitly, the probabilities are explained and not the logits before."""
    x = images()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.softmax(NET(leaf), 1).max(1).values.sum(), leaf)
    found = explained("saliency", x, NET.file(end="Softmax"), of="y", absolute=False)
    assert_allclose(found["attribution"], expected, **TOL)


def test_scores_with_places_are_summed_over_them() -> None:
    """As in fully convolutional networks, and in ones that forget to flatten."""
    w = np.random.default_rng(0).standard_normal((5, 3, 3, 3)).astype("f")
    file = graph_of("(float[N,3,8,8] image) => (float[N,5,6,6] y) { y = Conv (image, w) }", w=w)
    x = images()
    found = explained("saliency", x, file, label=1, absolute=False)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.conv2d(leaf, torch.tensor(w))[:, 1].sum(), leaf)
    assert_allclose(found["attribution"], expected, **TOL)


@pytest.mark.parametrize("ends", ["", "Softmax<axis=-1>", "Softmax<axis=1>"])
def test_one_place_of_scores_with_places(ends: str) -> None:
    text = "(float[N,3,8,8] image) => (float[N,3,8,8] y) { c = Conv(image, w) "
    file = graph_of(
        text + (f"y = {ends}(c) }}" if ends else "y = Identity(c) }"),
        w=np.random.default_rng(0).standard_normal((3, 3, 1, 1)).astype("f"),
    )
    x, axis = images(), 3 if "-1" in ends else 1
    numbers = (2, 4, 5) if axis == 1 else (5, 2, 4)  # the class first
    place = (slice(None), 2, 4, 5)
    found = explained("saliency", x, file, label=numbers, absolute=False)
    kernel = onnx.numpy_helper.to_array(file.graph.initializer[0])[2, :, 0, 0]
    want = np.zeros_like(x)
    want[:, :, 4, 5] = kernel
    assert_allclose(found["attribution"], want, **TOL)
    assert found["explained_label"].tolist() == [numbers[0]] * 3 and found["y"][place].shape == (3,)


def test_places_that_are_not_there() -> None:
    file = graph_of("(float[N,3,8,8] image) => (float[N,3,8,8] y) { y = Relu(image) }")
    with pytest.raises(ArgumentError, match=r"label of 2 numbers does not fit the scores 'y', which have 4 axes"):
        attribution.saliency(file, label=(1, 2))
    with pytest.raises(ArgumentError, match="no place 8 on axis 3 of the scores, which has 8"):
        attribution.saliency(file, label=(1, 2, 8))
    with pytest.raises(ArgumentError, match="a place in label must be at least 0"):
        attribution.saliency(file, label=(1, 2, -1))
    for wrong in ((), [1, 2, 3], np.array([1, 2, 3])):
        with pytest.raises(ArgumentError, match=r"not one class or place.*tuple \(class, place"):
            attribution.saliency(file, label=wrong)  # type: ignore[arg-type]


def test_every_method_takes_the_same_names() -> None:
    for name in attribution.__all__:
        assert list(inspect.signature(getattr(attribution, name)).parameters)[:2] == ["model", "label"]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="There is no class 5: the model has 5, numbered from 0"):
        attribution.saliency(NET.file(), label=5)
    with pytest.raises(ArgumentError, match=r"2 floating inputs \(a, b\), not one. Name one of them with input="):
        attribution.saliency(graph_of("(float[N,3] a, float[N,3] b) => (float[N,3] y) { y = Add (a, b) }"))
    with pytest.raises(ArgumentError, match=r"2 floating outputs \(y, z\), not one. Name the scores with of="):
        attribution.saliency(graph_of("(float[N,3] a) => (float[N,3] y, float[N,3] z) { y = Sin (a) z = Cos (a) }"))
    with pytest.raises(ArgumentError, match="No convolution leads from 'a' to the scores"):
        attribution.grad_cam(graph_of("(float[N,3] a) => (float[N,3] y) { y = Sin (a) }"))
    with pytest.raises(ArgumentError, match=r"'f' has shape .*: it has no spatial axes"):
        attribution.grad_cam(NET.file(), layer="f")
    with pytest.raises(ArgumentError, match="A stride of 3 leaves gaps between windows of 2"):
        attribution.occlusion(NET.file(), window=2, stride=3)
    with pytest.raises(ArgumentError, match="window has 3 numbers for 2 spatial axes"):
        attribution.occlusion(NET.file(), window=(2, 2, 2))
    with pytest.raises(ArgumentError, match="window must be a whole number, not None"):
        attribution.occlusion(NET.file(), window=None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="stride must be a whole number, not '2'"):
        attribution.occlusion(NET.file(), stride=["2"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"A baseline of shape \(2, 8, 8\) does not broadcast to 'image'"):
        attribution.integrated_gradients(NET.file(), baseline=np.zeros((2, 8, 8)))
    with pytest.raises(ArgumentError, match="stabilizer must be above 0"):
        attribution.lrp(NET.file(), stabilizer=0)
    with pytest.warns(UserWarning, match="The model has no Relu"):
        attribution.guided_backprop(graph_of("(float[N,3] a) => (float[N,3] y) { y = Sin (a) }"))


# -- the methods -------------------------------------------------------------------------------------------------------


def test_input_x_gradient() -> None:
    x = images()
    assert_allclose(explained("input_x_gradient", x)["attribution"], x * gradient(x, top(x)), **TOL)


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].relu() * (x > 0)


def test_guided_backprop() -> None:
    x = images()
    guided = Classifier()
    for name in ("relu1", "relu2"):
        delattr(guided, name)
        object.__setattr__(guided, name, _Guided.apply)
    assert_allclose(explained("guided_backprop", x)["attribution"], gradient(x, top(x), guided), **TOL)


def test_smooth_grad_with_given_noise() -> None:
    x = images()
    noise = 0.3 * torch.randn(5, *x.shape, generator=torch.Generator().manual_seed(2))
    found = explained("smooth_grad", x, samples=5, noise_input=True, feed={"noise": noise.numpy()})
    expected = torch.stack([gradient(x + n, top(x)) for n in noise]).mean(0)
    assert_allclose(found["attribution"], expected, **TOL)


def test_smooth_grad_draws_noise_in_every_turn() -> None:
    """For y = a^3 the mean of 3 (a + s)^2 tells the variance of the noise."""
    file = graph_of(
        "(float[N,1,30,40] image) => (float[N] y) { c = Mul (image, image) d = Mul (c, image)"
        " y = ReduceSum <keepdims = 0> (d, axes) }",
        axes=np.array([1, 2, 3]),
    )
    x = np.zeros((2, 1, 30, 40), "f")
    x[0, 0, 0, 0], x[1, 0, 0, 0] = 1, 4  # the ranges
    found = run(attribution.smooth_grad(file, samples=50, noise=0.5), {"image": x})["attribution"][:, 0, 1:]
    assert_allclose(found.mean((1, 2)) / 3, [0.25, 4], rtol=0.05)
    assert found[0].std() < 0.25 * found[0].mean()  # 50 different draws; one draw alone would give 1.4


@pytest.mark.parametrize("steps", [1, 7])
def test_integrated_gradients(steps: int) -> None:
    x, base = images(), images(seed=4) * 0.1
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    label = top(x)
    pairs = zip((nodes + 1) / 2, weights / 2, strict=True)
    mean = sum(w * gradient(base + float(a) * (x - base), label) for a, w in pairs)
    expected = (x - base) * mean
    found = explained("integrated_gradients", x, baseline="input", steps=steps, feed={"baseline": base.numpy()})
    assert_allclose(found["attribution"], expected, **TOL)
    delta = expected.sum((1, 2, 3)) - (score(x, label) - score(base, label)).detach()
    assert_allclose(found["convergence_delta"], delta, rtol=1e-4, atol=1e-4)


def test_integrated_gradients_are_complete() -> None:
    found = explained("integrated_gradients", images(), steps=300)
    assert np.abs(found["convergence_delta"]).max() < 0.02
    constant = explained("integrated_gradients", images(), baseline=np.full((3, 1, 1), 0.5), steps=300)
    assert np.abs(constant["convergence_delta"]).max() < 0.02
    assert np.abs(constant["attribution"] - found["attribution"]).max() > 0.01


def _cam(x: torch.Tensor, *, plus: bool) -> torch.Tensor:
    layer = NET.features(x).detach().requires_grad_()
    y = NET.linear(NET.mean(layer).flatten(1))
    (g,) = torch.autograd.grad(y.gather(1, top(x)[:, None]).sum(), layer)
    if plus:
        total = layer.sum((2, 3), keepdim=True)
        alpha = torch.where(g == 0, 0.0, g**2 / (2 * g**2 + total * g**3))
        weights = (alpha * g.relu()).sum((2, 3), keepdim=True)
    else:
        weights = g.mean((2, 3), keepdim=True)
    return (weights * layer).sum(1, keepdim=True).relu().detach()


@pytest.mark.parametrize("name", ["grad_cam", "grad_cam_plus_plus"])
def test_class_activation_maps(name: str) -> None:
    x = images()
    expected = _cam(x, plus=name.endswith("plus"))
    found = explained(name, x, layer=LAYER, resize=False)
    assert_allclose(found["attribution"], expected[:, 0], **TOL)
    found = explained(name, x)  # finds the layer
    large = F.interpolate(expected, (8, 8), mode="bilinear")
    assert_allclose(found["attribution"], large[:, 0], **TOL)


@pytest.mark.parametrize(("window", "stride"), [(3, 2), ((4, 3), (3, 1)), (8, None), (20, 20)])
def test_occlusion(window: Any, stride: Any) -> None:
    x = images()
    label = top(x)
    high, wide = (window, window) if isinstance(window, int) else window
    down, across = (
        ((high + 1) // 2, (wide + 1) // 2)
        if stride is None
        else (stride, stride)
        if isinstance(stride, int)
        else stride
    )
    total, count = torch.zeros_like(x), torch.zeros_like(x)
    rows, columns = (range(0, max(8 - n, 0) + s, s) for n, s in ((high, down), (wide, across)))
    for i, j in itertools.product(rows, columns):
        if i >= 8 or j >= 8:
            continue
        covered = x.clone()
        covered[:, :, i : i + high, j : j + wide] = 0.5
        loss = score(x, label) - score(covered, label)
        total[:, :, i : i + high, j : j + wide] += loss[:, None, None, None]
        count[:, :, i : i + high, j : j + wide] += 1
    options = {"window": window, "stride": stride, "baseline": 0.5}
    expected = (total / count).detach()
    assert_allclose(explained("occlusion", x, **options)["attribution"], expected, **TOL)
    file = NET.file(layout="NHWC")
    file.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "H"
    assert_allclose(explained("occlusion", x, file, **options)["attribution"], expected, **TOL)


def test_occlusion_of_a_single_gray_image() -> None:
    w = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    model = graph_of("(float[1,1,4,4] x) => (float[1,4] y) { f = Flatten (x)  y = Gemm <transB = 1> (f, w) }", w=w)
    x = np.random.default_rng(1).standard_normal((1, 1, 4, 4)).astype(np.float32)
    found = run(attribution.occlusion(model, window=1, stride=1), {"x": x})
    label = int((w @ x.reshape(-1)).argmax())
    assert_allclose(found["attribution"], w[label].reshape(1, 1, 4, 4) * x, rtol=1e-4, atol=1e-5)


def _relevance(net: Classifier, x: torch.Tensor, epsilon: float, gamma: float) -> torch.Tensor:
    """By the formula, layer by layer: R_i = x_i sum_j W'_ji R_j / (z'_j + eps)."""

    def through(layer: torch.nn.Module, a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        a = a.detach().requires_grad_()
        weight = layer.weight + gamma * layer.weight.clamp(min=0)
        z = F.linear(a, weight, layer.bias) if a.ndim == 2 else F.conv2d(a, weight, layer.bias, padding=1)
        s = r / (z + torch.where(z < 0, -epsilon, epsilon))
        return (a * torch.autograd.grad(z, a, s.detach())[0]).detach()

    a1 = net.relu1(net.conv1(x))
    h = net.pool(a1)
    a2 = net.features(x)
    f = net.mean(a2).flatten(1)
    y = net.linear(f)
    r = through(net.linear, f, (F.one_hot(y.argmax(1), 5) * y).detach())
    r = (a2 / 16 / f[:, :, None, None].clamp(min=1e-30) * r[:, :, None, None]).detach()
    if net.residual:
        z = net.conv2(h)
        both = torch.where(z + h == 0, 1.0, z + h)
        shares = (z / both * r).detach(), (h / both * r).detach()
    else:
        shares = r, torch.zeros_like(h)
    r = through(net.conv2, h, shares[0]) + shares[1]
    leaf = a1.detach().requires_grad_()
    pooled = net.pool(leaf)
    r = leaf * torch.autograd.grad(pooled, leaf, torch.where(pooled == 0, 0.0, r / pooled).detach())[0]
    return through(net.conv1, x, r.detach())


@pytest.mark.parametrize(("epsilon", "gamma"), [(1e-6, 0.0), (0.2, 0.0), (1e-6, 0.25)])
@pytest.mark.parametrize("product", ["Gemm", "MatMul"])
def test_layer_wise_relevance(epsilon: float, gamma: float, product: str) -> None:
    x = images()
    found = explained("lrp", x, NET.file(product=product, end="Softmax"), stabilizer=epsilon, gamma=gamma)
    assert_allclose(found["attribution"], _relevance(NET, x, epsilon, gamma), rtol=1e-3, atol=1e-5)


def test_relevance_is_conserved_without_biases() -> None:
    net, x = Classifier(bias=False), images()
    found = explained("lrp", x, net.file(), stabilizer=1e-9)
    assert_allclose(found["attribution"].sum((1, 2, 3)), net(x).max(1).values.detach(), rtol=1e-3)


def test_relevance_passes_activations_and_products() -> None:
    """A gate passes half of the relevance to each factor, and a Sigmoid all of its own."""
    v = np.array([[0.4, -1.2, 0.7], [0.9, 0.3, -0.5]], "f")
    file = graph_of(
        "(float[N,2] image) => (float[N,3] y) { a = MatMul (image, v) s = Sigmoid (a) y = Mul (a, s) }", v=v
    )
    x = np.array([[0.3, -0.8], [1.1, 0.4]], "f")
    found = run(attribution.lrp(file, stabilizer=1e-9), {"image": x})
    assert_allclose(found["attribution"].sum(1), found["y"].max(1), rtol=1e-4)
