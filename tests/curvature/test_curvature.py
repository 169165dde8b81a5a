"""Curvature equals matrices that PyTorch builds entry by entry, in float64 where ONNX Runtime has the kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from onnx_convgrad import curvature, losses
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
STORED = {"w": RNG.standard_normal((4, 5)), "c": RNG.standard_normal(5), "v": RNG.standard_normal((3, 5))}
X = torch.tensor(RNG.standard_normal((6, 4)))
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
NUMBERS = torch.tensor(RNG.random((6, 3)))
TARGETS = {"cross_entropy": LABELS, "mse": NUMBERS, "bce_with_logits": NUMBERS, "huber": NUMBERS}
THEIRS: dict[str, Any] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
}
OURS = {"cross_entropy": losses.CrossEntropy, "mse": losses.MSE, "bce_with_logits": losses.BCEWithLogits}
TOL = {"rtol": 1e-8, "atol": 1e-11}


def mlp(batch: str = "N") -> onnx.ModelProto:
    return graph_of(
        f"""(double[{batch},4] x) => (double[{batch},3] y) {{
        a = MatMul (x, w) b = Add (a, c) h = Tanh (b) y = Gemm <transB = 1> (h, v)
        }}""",
        **STORED,
    )


def fed(name: str, count: int = 6) -> dict[str, np.ndarray]:
    """Inputs and labels."""
    feed = {"x": X[:count].numpy(), "target": TARGETS[name][:count].numpy()}
    return {key: value if value.dtype.kind == "i" else value.astype(float) for key, value in feed.items()}


def plain(flat: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    """The outputs, from the parameters in one vector: w, c, v."""
    w, c, v = flat[:20].reshape(4, 5), flat[20:25], flat[25:].reshape(3, 5)
    return torch.tanh(x @ w + c) @ v.T


FLAT = torch.cat([torch.tensor(a).flatten() for a in STORED.values()])


def split(flat: Any) -> dict[str, np.ndarray]:
    """Numbers for all parameters, by name."""
    parts = np.split(np.asarray(flat), [20, 25])
    return {name: part.reshape(STORED[name].shape) for name, part in zip(STORED, parts, strict=True)}


def ggn(name: str, reduction: str = "mean", x: torch.Tensor = X) -> torch.Tensor:
    """J^T H J."""
    target = TARGETS[name][: len(x)]
    jacobian = jacrev(lambda f: plain(f, x))(FLAT).reshape(-1, len(FLAT))
    y = plain(FLAT, x)
    loss = functools.partial(THEIRS[name], target=target, reduction=reduction)
    bent = jacrev(jacrev(loss))(y).reshape(y.numel(), y.numel())
    return jacobian.T @ bent @ jacobian


@pytest.mark.parametrize("name", TARGETS)
def test_products_with_the_gauss_newton_matrix(name: str) -> None:
    vector = torch.tensor(np.random.default_rng(1).standard_normal(40))
    feed = {f"{p}_vector": value for p, value in split(vector).items()}
    found = run(curvature.ggn_product(mlp(), loss=name), {**fed(name), **feed})
    assert_allclose(found.pop("loss"), THEIRS[name](plain(FLAT), TARGETS[name]), rtol=1e-6)
    assert list(found) == [f"{p}_ggn_product" for p in STORED]
    for value, expected in zip(found.values(), split(ggn(name) @ vector).values(), strict=True):
        assert_allclose(value, expected, **TOL)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("batch", ["N", "6"])
def test_diagonal_of_the_gauss_newton_matrix(name: str, reduction: str, batch: str) -> None:
    found = run(curvature.diagonal_ggn(mlp(batch), loss=OURS[name](reduction=reduction)), fed(name))
    for p, expected in split(ggn(name, reduction).diagonal()).items():
        assert_allclose(found[f"{p}_diagonal_ggn"], expected, **TOL)


def test_exact_diagonal_of_the_hessian() -> None:
    found = run(
        curvature.hessian_diagonal(mlp(), loss="cross_entropy", method="exact"),
        {"x": X.numpy(), "target": LABELS.numpy()},
    )
    expected = jacrev(jacrev(lambda f: F.cross_entropy(plain(f), LABELS)))(FLAT).diagonal()
    for p, value in split(expected).items():
        assert_allclose(found[f"{p}_hessian_diagonal"], value, **TOL)


@pytest.mark.slow
def test_estimated_diagonal_of_the_hessian() -> None:
    """Of a diagonal Hessian every sample is exact; of another the mean converges."""
    scale = np.arange(1.0, 7)
    square = graph_of(
        "(double[6] x) => (double s) { q = Mul (x, x) r = Mul (q, c) s = ReduceSum <keepdims = 0> (r) }", c=scale
    )
    found = run(curvature.hessian_diagonal(square, loss="s", wrt="x", samples=1), {"x": np.ones(6)})
    assert_allclose(found["x_hessian_diagonal"], 2 * scale, **TOL)
    feed = {"x": X.numpy(), "target": LABELS.numpy()}
    exact = run(curvature.hessian_diagonal(mlp(), loss="cross_entropy", method="exact"), feed)
    errors = []
    for samples in (20, 2000):
        rough = run(curvature.hessian_diagonal(mlp(), loss="cross_entropy", samples=samples), feed)
        errors.append(sum(np.square(rough[n] - exact[n]).sum() for n in exact if n != "loss"))
    assert errors[1] < errors[0] / 10


# -- Kronecker factors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_factors_of_one_sample_are_exact(name: str) -> None:
    x = X[:1]
    found = run(curvature.kfac(mlp(), loss=name), fed(name, 1))
    block = ggn(name, x=x)
    a, b = (found[f"v_{kind}_covariance"] for kind in ("input", "gradient"))
    assert_allclose(np.kron(b, a), block[25:, 25:], **TOL)
    a, b = (found[f"w_{kind}_covariance"] for kind in ("input", "gradient"))
    assert_allclose(np.kron(a, b), block[:20, :20], **TOL)  # stored as [in, out]
    assert_allclose(b, block[20:25, 20:25], **TOL)  # the bias behind


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 1.0), (0.5, 2.0), (2.0, 0.5)])
def test_factors_of_a_gemm_with_alpha_and_beta(alpha: float, beta: float) -> None:
    text = "(double[N,4] x) => (double[N,3] y) {{ h = Gemm <alpha = {}, beta = {}> (x, w, c) y = Gemm <transB = 1> (h, v) }}"
    model = graph_of(text.format(alpha, beta), **STORED)
    feed = fed("mse", 1)
    found = run(curvature.kfac(model, loss="mse"), feed)
    row = STORED["v"] * np.sqrt(2 / 3)  # the root of the Hessian of the loss times the derivative by h
    assert_allclose(
        found["w_input_covariance"][:, None, :, None] * found["w_gradient_covariance"][None, :, None, :],
        alpha**2 * np.einsum("ni,nj,ka,kb->iajb", feed["x"], feed["x"], row, row),
        **TOL,
    )
    assert_allclose(found["w_gradient_covariance"], beta**2 * row.T @ row, **TOL)


def _own(net: Classifier, x: torch.Tensor, *, reduce: bool) -> dict[str, np.ndarray]:
    """Factors of the three layers by their definition, for the cross entropy with reduction mean."""
    layers = {"w1": net.conv1, "w2": net.conv2, "v": net.linear}
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda _, a, y, name=name: kept.update({name: (a[0].detach(), y)}))
        for name, layer in layers.items()
    ]
    y = net(x)
    for hook in hooks:
        hook.remove()
    p = y.softmax(1).detach()
    found = {}
    for name, (a, out) in kept.items():
        rows = F.unfold(a, 3, padding=1).transpose(1, 2) if a.ndim == 4 else a[:, None]
        rows = rows.mean(1) if reduce else rows.flatten(0, 1)
        found[f"{name}_input_covariance"] = (rows.T @ rows / len(rows)).numpy()
        total = torch.zeros(out.shape[1], out.shape[1])
        for c in range(y.shape[1]):
            column = p[:, c : c + 1].sqrt() * (F.one_hot(torch.tensor(c), y.shape[1]) - p)
            (g,) = torch.autograd.grad(y, out, column, retain_graph=True)
            g = g.flatten(2).transpose(1, 2) if g.ndim == 4 else g[:, None]
            g = g.sum(1) if reduce else g.flatten(0, 1)
            total += g.T @ g / len(x)
        found[f"{name}_gradient_covariance"] = total.numpy()
    return found


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_factors_of_convolutions(approximation: str) -> None:
    net = Classifier().balanced()
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    made = curvature.kfac(net.file(), loss="cross_entropy", approximation=approximation)
    onnx.checker.check_model(made, full_check=True)
    found = run(made, {"image": x.numpy(), "target": np.array([0, 1, 2])})
    expected = _own(net, x, reduce=approximation == "reduce")
    assert set(found) == {"loss", *expected}
    for name, value in expected.items():
        assert_allclose(found[name], value, rtol=1e-3, atol=1e-5 * np.abs(value).max())


def test_automatic_padding_of_sizes_that_are_not_known() -> None:
    """The factors are those of the padding written out, for an input of 5 x 5."""
    weights = {"w": np.linspace(-1, 1, 27, dtype="f").reshape(1, 3, 3, 3), "v": np.ones((1, 2), "f")}
    feed = {"x": np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype("f"), "target": np.ones((2, 2), "f")}
    found = []
    for padding in ('auto_pad = "SAME_UPPER"', "pads = [1, 1, 1, 1]"):
        text = (
            f"(float[N, 3, H, W] x) => (float[N, 2] y) {{ a = Conv <strides = [2, 2], {padding}> (x, w) "
            "p = GlobalAveragePool (a) f = Flatten (p) y = MatMul (f, v) }"
        )
        found.append(run(curvature.kfac(graph_of(text, **weights), loss="mse"), feed))
    assert {"w_input_covariance", "w_gradient_covariance", "v_input_covariance"} < set(found[0])
    for name, value in found[1].items():
        assert_allclose(found[0][name], value, rtol=1e-5)


@pytest.mark.slow
def test_eigenvalues_are_second_moments_in_the_basis_of_the_factors() -> None:
    net = Classifier().balanced()
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    factors = run(curvature.kfac(net.file(), loss="cross_entropy"), {"image": x.numpy(), "target": np.array([0, 1, 2])})
    bases = {
        name.replace("covariance", "basis"): np.linalg.eigh(value)[1]
        for name, value in factors.items()
        if name != "loss"
    }
    made = curvature.ekfac(net.file(), loss="cross_entropy")
    found = run(made, {"image": x.numpy(), "target": np.array([0, 1, 2]), **bases})
    named = dict(net.named_parameters())
    for weight, key in (("w1", "conv1.weight"), ("w2", "conv2.weight"), ("v", "linear.weight")):
        total: Any = 0
        for one in x:
            y = net(one[None])[0].detach()
            jacobian = jacrev(lambda w, one=one, key=key: functional_call(net, {key: w}, (one[None],))[0])(named[key])
            bent = jacrev(jacrev(lambda z: F.cross_entropy(z, torch.tensor(0))))(y)
            values, vectors = torch.linalg.eigh(bent)
            root = vectors * values.clamp(min=0).sqrt()
            gradients = torch.einsum("cd,c...->d...", root, jacobian).flatten(2).detach().numpy()
            rotated = bases[f"{weight}_gradient_basis"].T @ gradients @ bases[f"{weight}_input_basis"]
            total = total + np.square(rotated).sum(0)
        expected = total / len(x)
        assert_allclose(found[f"{weight}_eigenvalues"], expected, rtol=1e-3, atol=1e-4 * expected.max())


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="This curvature is known for cross_entropy, mse and bce_with_logits"):
        curvature.diagonal_ggn(mlp(), loss="huber")
    with pytest.raises(ArgumentError, match="without other options"):
        curvature.kfac(mlp(), loss=losses.CrossEntropy(label_smoothing=0.1))
    with pytest.raises(ArgumentError, match="The curvature of one loss can be computed"):
        curvature.ggn_product(mlp(), loss={"y": (0.5, "mse")})
    with pytest.raises(ArgumentError, match="Unknown method 'guess'"):
        curvature.hessian_diagonal(mlp(), loss="mse", method="guess")
    with pytest.raises(ArgumentError, match="Unknown approximation 'both'"):
        curvature.kfac(mlp(), loss="mse", approximation="both")
    with pytest.raises(ModelError, match="No Conv without groups, Gemm or MatMul has a stored weight in wrt"):
        curvature.kfac(mlp(), loss="mse", wrt="c")
    weights = {"g": np.ones((3, 1, 3, 3), "f"), "v": np.ones((27, 2), "f")}
    text = "(float[N,3,5,5] x) => (float[N,2] y) { a = Conv <group = 3> (x, g) f = Flatten (a) y = MatMul (f, v) }"
    grouped = graph_of(text, **weights)
    with pytest.warns(UserWarning, match="These values have no Kronecker factors: g"):
        curvature.kfac(grouped, loss="mse")
