"""Run PyTorch's own samples and error inputs of its convolutions through `onnx_convgrad.functional`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError

OPERATORS = [f"nn.functional.conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)]
DTYPES = [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]
TOLERANCE = {"float16": 1e-3, "float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}

pytestmark = [
    pytest.mark.slow,
    # torch warns at the first jvp, and about paddings that need a copy
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using padding=.same:UserWarning"),
]


@cache
def _info(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    (found,) = (op for op in invocations.op_db if op.name == name and not op.variant_test_name)
    return found


def _samples(name: str, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]]:
    """Every sample in float32; in other dtypes only samples with a batch axis, since the others use the same models."""
    torch.manual_seed(0)
    count = 0
    for sample in _info(name).sample_inputs("cpu", dtype):
        if dtype is torch.float32 or sample.input.ndim == sample.args[0].ndim:
            count += 1
            yield sample.input, *sample.args, sample.kwargs
    assert count


def _options(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "transposed": "transpose" in name}


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).requires_grad_()


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype).to(dtype)


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().numpy()


def _agree(found: Any, expected: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    wanted = _array(expected)
    name = str(dtype).removeprefix("torch.")
    assert found.shape == wanted.shape, what
    assert found.dtype == name, what
    scale = max(np.abs(wanted).max(initial=0), 1e-3)
    assert np.abs(found - wanted).max(initial=0) <= TOLERANCE[name] * scale, what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    """Forward, the three gradients, double backward and forward mode agree with autograd in double precision."""
    operator = _info(name).op
    for x, w, b, kwargs in _samples(name, dtype):
        what = f"{list(x.shape)} {list(w.shape)} {kwargs}"
        given = [x, w] if b is None else [x, w, b]
        arrays = [_array(t) for t in given]
        options = _options(name, kwargs)
        exact = [_exact(t) for t in given]
        y = operator(*exact, **kwargs)
        _agree(F.convolution(*arrays, **options), y, dtype, f"forward {what}")

        seed = _like(y, dtype)
        exact_seed = _exact(seed)
        gradients = torch.autograd.grad(y, exact, exact_seed, create_graph=True)
        mask = (True, True, b is not None)
        sizes = None if b is None else list(b.shape)
        found = F.convolution_backward(_array(seed), *arrays[:2], sizes, **options, output_mask=mask)
        assert (found[2] is None) == (b is None)
        for value, gradient in zip(found, gradients, strict=False):
            _agree(value, gradient, dtype, f"gradient {what}")

        along = [_like(t, dtype) for t in exact]
        directions = [_array(t) for t in along]
        ggs = [*directions, None][:3]
        second = torch.autograd.grad(gradients, [exact_seed, *exact[:2]], [_exact(t) for t in along])
        found = F.convolution_double_backward(*ggs, _array(seed), arrays[1], arrays[0], **options)
        for value, gradient in zip(found, second, strict=True):
            _agree(value, gradient, dtype, f"double backward {what}")

        _, pushed = torch.func.jvp(partial(operator, **kwargs), tuple(exact), tuple(map(_exact, along)))
        _agree(F.convolution_jvp(*arrays[:2], *directions, **options), pushed, dtype, f"forward mode {what}")


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_by_name(name: str) -> None:
    """The functions for one rank and one gradient agree with `convolution_backward`."""
    stem = name.rpartition(".")[2]
    for *operands, _, kwargs in _samples(name, torch.float32):
        x, w = map(_array, operands)
        options = _options(name, kwargs)
        seed = np.random.default_rng(0).standard_normal(F.convolution(x, w, **options).shape).astype(np.float32)
        dx, dw, _ = F.convolution_backward(seed, x, w, **options, output_mask=(1, 1, 0))
        for suffix, first, second, expected in (("input", x.shape, w, dx), ("weight", x, w.shape, dw)):
            found = getattr(F, f"{stem}_{suffix}")(first, second, seed, **kwargs)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in OPERATORS if "transpose" not in name])
def test_errors(name: str) -> None:
    """Arguments that PyTorch refuses are refused with its message."""
    count = 0
    for error in _info(name).error_inputs("cpu"):
        count += 1
        sample = error.sample_input
        x, w, b = _array(sample.input), _array(sample.args[0]), _array(sample.args[1])
        with pytest.raises(ArgumentError, match=error.error_regex):
            F.convolution(x, w, b, **sample.kwargs)
        for bias_sizes in (None, b.shape):  # the dtype of the bias does not matter
            with pytest.raises(ArgumentError):
                F.convolution_backward(x, x, w, bias_sizes, **sample.kwargs)
    assert count >= 9
