"""`onnx_convgrad.functional` agrees with PyTorch's functions of the same names; masks, empty arrays, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional import sessions
from tests.support.conv_geometry import CONV, TRANSPOSED

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _restart() -> None:
    """Each test draws the same numbers, whichever tests run before it."""
    RNG.bit_generator.state = START


def rand(*shape: int, dtype: str = "float64") -> np.ndarray:
    parts = RNG.standard_normal(shape), RNG.standard_normal(shape)
    return (parts[0] + 1j * parts[1] if dtype.startswith("complex") else parts[0]).astype(dtype)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, requires_grad=True)


def same(found: tuple[np.ndarray | None, ...], expected: tuple[torch.Tensor | None, ...], **tolerance: float) -> None:
    """Check that the two sides agree on which results are `None`, and that the others are equal."""
    assert [value is None for value in found] == [value is None for value in expected]
    for value, reference in zip(found, expected, strict=True):
        if value is not None:
            np.testing.assert_allclose(value, reference.numpy(), **tolerance)


# -- against PyTorch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_torch_nn_grad(rank: int) -> None:
    x, w = rand(2, 4, *[7] * rank), rand(6, 2, *[3] * rank)
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 1, "groups": 2}
    g = rand(*CONV[rank](tensor(x), tensor(w), **options).shape)
    for suffix, first, second in (("input", x.shape, w), ("weight", x, w.shape)):
        name = f"conv{rank}d_{suffix}"
        theirs = [a if isinstance(a, tuple) else torch.tensor(a) for a in (first, second, g)]
        expected = getattr(torch.nn.grad, name)(*theirs, **options).numpy()
        np.testing.assert_allclose(getattr(F, name)(first, second, g, **options), expected, atol=1e-12)
        mine, original = (inspect.signature(getattr(m, name)).parameters for m in (F, torch.nn.grad))
        positional = [p for p in mine.values() if p.kind is not p.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in original.values()]


@pytest.mark.parametrize("mask", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_aten_backward(transposed: bool, mask: tuple[bool, ...]) -> None:
    x, w = rand(3, 4, 6, 5), rand(4, 3, 2, 3) if transposed else rand(6, 2, 2, 3)
    numbers = ([2, 1], [1, 0], [1, 2], transposed, [1, 1] if transposed else [0, 0], 2)
    y = torch.convolution(torch.tensor(x), torch.tensor(w), None, *numbers)
    g = rand(*y.shape)
    theirs = [torch.tensor(a) for a in (g, x, w)]
    expected = torch.ops.aten.convolution_backward(*theirs, [6], *numbers, list(map(bool, mask)))
    found = F.convolution_backward(g, x, w, [6], *numbers, mask)
    same(found, expected, atol=1e-12)


@pytest.mark.parametrize("given", range(8))
@pytest.mark.parametrize("transposed", [False, True])
def test_aten_double_backward(transposed: bool, given: int) -> None:
    """Every subset of cotangents, every result; results that ATen leaves undefined are zero."""
    x, w = rand(2, 4, 6), rand(4, 3, 3) if transposed else rand(6, 2, 3)
    numbers = ([2], [1], [1], transposed, [1] if transposed else [0], 2)
    y = torch.convolution(torch.tensor(x), torch.tensor(w), None, *numbers)
    g = rand(*y.shape)
    ggs = [a if given >> i & 1 else None for i, a in enumerate((rand(*x.shape), rand(*w.shape), rand(6)))]
    theirs = [None if a is None else torch.tensor(a) for a in (*ggs, g, w, x)]
    expected = torch.ops.aten._convolution_double_backward(*theirs, *numbers, [True] * 3)
    found = F.convolution_double_backward(*ggs, g, w, x, *numbers)
    for value, reference, of in zip(found, expected, (g, x, w), strict=True):
        np.testing.assert_allclose(value, np.zeros(of.shape) if reference is None else reference.numpy(), atol=1e-12)
    assert F.convolution_double_backward(*ggs, g, w, x, *numbers, (0, 0, 0)) == (None, None, None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_per_sample(transposed: bool, rank: int, dtype: str) -> None:
    """Each sample's gradients equal those of a batch of one; without a batch axis the gradients have none either."""
    x = rand(3, 4, *[6] * rank, dtype=dtype)
    w = rand(*((4, 3) if transposed else (6, 2)), *[3] * rank, dtype=dtype)
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2} | ({"output_padding": 1} if transposed else {})
    operator = (TRANSPOSED if transposed else CONV)[rank]
    name = f"conv{'_transpose' * transposed}{rank}d_per_sample_grad"
    b = tensor(rand(6, dtype=dtype))
    y = operator(torch.tensor(x), torch.tensor(w), b, **options)
    g = rand(*y.shape, dtype=dtype)
    dw, db = getattr(F, name)(x, w, g, **options)
    assert (dw.dtype, dw.shape, db.shape) == (dtype, (3, *w.shape), (3, 6))
    alone, nothing = getattr(F, name)(x[0], w, g[0], **options, bias=False)
    assert nothing is None
    exact = dtype.replace("float32", "float64")
    tolerance = {"rtol": 1e-7, "atol": 1e-4 if dtype == "float32" else 1e-11}
    weight, bias = tensor(w.astype(exact)), b.detach().to(getattr(torch, exact)).requires_grad_()
    for i in range(3):
        y = operator(torch.tensor(x[i : i + 1].astype(exact)), weight, bias, **options)
        expected = torch.autograd.grad(y, (weight, bias), torch.tensor(g[i : i + 1].astype(exact)))
        same((dw[i], db[i]), expected, **tolerance)
        if i == 0:
            same((alone,), expected[:1], **tolerance)


# -- excluded results -------------------------------------------------------------------------------------------------


def test_excluded_results_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[bytes] = []
    original = sessions.session
    monkeypatch.setattr(sessions, "session", lambda m, **options: models.append(m) or original(m, **options))
    x, w, g = rand(2, 3, 11, dtype="float32"), rand(4, 3, 3, dtype="float32"), rand(2, 4, 9, dtype="float32")
    F.convolution_backward(g, x, w, output_mask=(False, False, True))
    F.convolution_backward(g, x, w, output_mask=(True, False, False))
    bias, data = map(onnx.load_from_string, models)
    assert [v.name for v in bias.graph.input] == ["grad_output"]
    assert {node.op_type for node in bias.graph.node} == {"ReduceSum"}
    assert sorted(v.name for v in data.graph.input) == ["grad_output", "weight"]
    assert F.convolution_backward(g, x, w, output_mask=(False, False, False)) == (None, None, None)
    assert len(models) == 2


# -- empty arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize(("x", "w"), [((0, 2, 5), (3, 2, 3)), ((2, 0, 5), (3, 0, 3)), ((0, 5), (3, 0, 3))], ids=str)
def test_empty(x: tuple[int, ...], w: tuple[int, ...], dtype: str) -> None:
    """Zero batch and zero channels: there is no product, so only the bias contributes."""
    a, b, bias = rand(*x, dtype=dtype), rand(*w, dtype=dtype), rand(3, dtype=dtype)
    y = F.convolution(a, b, bias)
    assert y.shape == (*x[:-2], 3, 3)
    np.testing.assert_array_equal(y, np.broadcast_to(bias[:, None], y.shape))
    g = rand(*y.shape, dtype=dtype)
    dx, dw, db = F.convolution_backward(g, a, b, [3])
    axes = tuple(i for i in range(g.ndim) if i != g.ndim - 2)
    np.testing.assert_allclose(db, g.sum(axis=axes), rtol=1e-5, atol=1e-5)
    assert (dx.shape, dw.shape) == (x, w)
    assert not dw.any()
    second, dx, dw = F.convolution_double_backward(a, b, bias, g, b, a)
    np.testing.assert_array_equal(second, y)
    assert (dx.shape, dw.shape, dw.any()) == (x, w, False)
    np.testing.assert_array_equal(F.convolution_jvp(a, b, a, b, bias), y)
    per_weight, per_bias = F.conv1d_per_sample_grad(a, b, g)
    assert (per_weight.shape, per_bias.shape) == ((*x[:-2], *w), (*x[:-2], 3))


def test_pytorch_outputs_without_channels() -> None:
    """PyTorch's output for an input without channels has no channels either; the gradients are zero."""
    x, w = rand(2, 0, 5), rand(3, 0, 3)
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    y = torch.nn.functional.conv1d(*theirs)
    assert y.shape == (2, 0, 3)
    expected = torch.autograd.grad(y, theirs, torch.ones_like(y))
    same(F.convolution_backward(np.ones(y.shape), x, w)[:2], expected)
    second, _, _ = F.convolution_double_backward(x, w, None, np.ones(y.shape), w, x)
    assert second.shape == y.shape


def test_padding_that_trims_every_product() -> None:
    """Only the rows of output padding remain; ONNX Runtime refuses such a ConvTranspose."""
    x, w, bias = rand(2, 3, 1), rand(3, 1, 1), rand(3)
    options: dict[str, Any] = {"stride": 3, "padding": 1, "output_padding": 2, "groups": 3}
    y = torch.nn.functional.conv_transpose1d(*map(torch.tensor, (x, w, bias)), **options).numpy()
    np.testing.assert_array_equal(F.convolution(x, w, bias, transposed=True, **options), y)
    dx, dw, db = F.convolution_backward(y, x, w, transposed=True, **options)
    assert not dx.any() and not dw.any()
    np.testing.assert_allclose(db, y.sum(axis=(0, 2)))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lists_and_layouts(dtype: str) -> None:
    """Nested lists, strided views and broadcast arrays are accepted."""
    x, w = rand(2, 8, 3, dtype=dtype), rand(4, 3, 3, dtype=dtype)
    y = F.convolution(np.ascontiguousarray(x.transpose(0, 2, 1)), w)
    np.testing.assert_array_equal(F.convolution(x.transpose(0, 2, 1), w), y)
    ones = np.broadcast_to(np.ones((), dtype), y.shape)
    bias = F.convolution_backward(ones, x.transpose(0, 2, 1), w)[2]
    np.testing.assert_array_equal(bias, np.full(4, y.shape[0] * y.shape[2]))
    if dtype == "float32":
        assert F.convolution([[[1.0, 2.0]]], [[[1.0]]]).dtype == np.float64


REFUSED = [
    ({"stride": 0}, "non-positive stride is not supported, but got stride=[0, 0]: 0 is less than 1."),
    ({"stride": (1, 2, 3)}, "stride to be a single integer value or a list of 2 values .* which has 3"),
    ({"stride": 1.5}, "stride must be an integer or a sequence of integers, not 1.5"),
    ({"padding": (0, -2)}, "negative padding is not supported, but got padding=[0, -2]: -2 is less than 0"),
    ({"padding": "full"}, "Invalid padding string: 'full', should be one of 'valid', 'same'"),
    ({"padding": "same", "stride": 2}, "padding='same' is not supported for strided convolutions: stride=[2, 2]"),
    ({"padding": "same", "transposed": True, "weight": (4, 3, 3, 3)}, "'same' is not supported for transposed"),
    ({"dilation": 0}, "dilation should be greater than zero, but got [0, 0]: 0 is less than 1"),
    ({"dilation": 4}, "padded input size per channel: (7 x 7). Kernel size: (9 x 9). Kernel size can't be greater"),
    ({"groups": 3, "weight": (7, 2, 3, 3)}, "weight to be divisible by 3 at dimension 0, .* size [[7, 2, 3, 3]]"),
    ({"groups": 2}, "expected input[2, 4, 7, 7] to have 8 channels, but got 4 channels instead"),
    ({"input": (2, 5, 7, 7)}, "expected input[2, 5, 7, 7] to have 4 channels, but got 5 channels instead"),
    ({"input": (7, 7)}, "Expected 4-dimensional input for 4-dimensional weight [6, 4, 3, 3], but got 2-dimensional"),
    ({"weight": (6, 4)}, "weight should have at least three dimensions, but got weight of size [6, 4]"),
    ({"weight": (6, 4, 0, 3)}, "kernel size should be greater than zero, but got weight of size [6, 4, 0, 3]"),
    ({"input": (2, 4, 0, 7), "padding": 2}, "Only zero batch or zero channel inputs .* input shape: [2, 4, 0, 7]"),
    ({"output_padding": 1}, "got output_padding=[1, 1] with transposed=False"),
    (
        {"transposed": True, "weight": (4, 3, 3, 3), "output_padding": 2, "stride": 2},
        "must be smaller than either stride or dilation, but got output_padding_height: 2 output_padding_width: 2",
    ),
    (
        {"transposed": True, "weight": (4, 3, 3, 3), "padding": 5},
        "input size per channel: (7 x 7). Calculated output size per channel: (-1 x -1). Output size is too small",
    ),
    ({"bias": (5,)}, "expected bias to be 1-dimensional with 6 elements, but got bias of size [5] instead"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda v: "" if isinstance(v, str) else str(v))
def test_refused_arguments(changed: dict[str, Any], message: str) -> None:
    """PyTorch refuses each of these too; the message has both numbers."""
    sizes = {"input": (2, 4, 7, 7), "weight": (6, 4, 3, 3), "bias": None, **changed}
    arrays = {name: None if (size := sizes.pop(name)) is None else rand(*size) for name in ("input", "weight", "bias")}
    pattern = message.translate({ord(c): f"\\{c}" for c in "()[]"})
    with pytest.raises(ArgumentError, match=pattern):
        F.convolution(**arrays, **sizes)
    keys = "stride padding dilation transposed output_padding groups".split()
    defaults = dict(zip(keys, (1, 0, 1, False, 0, 1), strict=True))
    given = {k: [v] if isinstance(v, int) and k not in ("transposed", "groups") else v for k, v in sizes.items()}
    theirs = [None if a is None else torch.tensor(a) for a in arrays.values()]
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        torch.convolution(*theirs, *{**defaults, **{k: [0] for k in keys[4:5]}, **given}.values())


X, W, G = (np.random.default_rng(1).standard_normal(shape) for shape in ((2, 3, 7), (4, 3, 3), (2, 4, 5)))
REFUSED_SHAPES: dict[str, Callable[[], object]] = {
    r"grad_output to have the size of the output, \[2, 4, 5\], but got \[2, 4, 4\]":
        lambda: F.conv1d_weight(X, W.shape, G[..., :4]),
    "Expected 4-dimensional weight, but got 3-dimensional weight": lambda: F.conv2d_input(X.shape, W, G),
    "grad_output must be an array, not None": lambda: F.convolution_backward(None, X, W),
    "A provider is a name or a pair": lambda: F.conv1d_weight(X, W.shape, G, providers=3),
    "input_size must not be negative": lambda: F.conv1d_input((2, 3, -7), W, G),
    r"Input type \(float64\) and grad_output type \(float32\) should be the same":
        lambda: F.convolution_backward(G.astype("float32"), X, W),
    r"Input type \(int64\) is not supported. There are float16, bfloat16, float32":
        lambda: F.convolution(X.astype(int), W.astype(int)),
    "output_mask needs 3 entries, one per result, but has 2 entries":
        lambda: F.convolution_backward(G, X, W, output_mask=(True, False)),
    r"expected bias to be 1-dimensional with 4 elements, .* size \[3\]":
        lambda: F.convolution_backward(G, X, W, [3]),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_SHAPES)
def test_refused_shapes(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        REFUSED_SHAPES[message]()


def test_only_transposed_functions_take_output_padding() -> None:
    with pytest.raises(ArgumentError, match=r"conv1d_input\(\) got an unexpected keyword argument 'output_padding'"):
        F.conv1d_input((2, 3, 7), rand(4, 3, 3), rand(2, 4, 5), output_padding=1)


def test_bias_sizes_as_in_graphs_of_aten() -> None:
    """`[0]` stands for no bias; the size of a bias that the mask excludes is ignored."""
    x, w, g = rand(2, 3, 7), rand(4, 3, 3), rand(2, 4, 5)
    for sizes, mask in (([0], (True, True, False)), ([3], (True, True, False)), ([0], (True, True, True))):
        args = (sizes, [1], [0], [1], False, [0], 1, mask)
        want = torch.ops.aten.convolution_backward(*map(torch.tensor, (g, x, w)), *args)
        same(F.convolution_backward(g, x, w, *args), want, rtol=1e-5, atol=1e-5)
