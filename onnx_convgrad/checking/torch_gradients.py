"""Rebuild a canonical graph in PyTorch, independently of the runtime, and compute its gradients with autograd."""

# ruff: noqa: ARG001, ARG005, N812 - all operators share one signature; F is PyTorch's custom

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from onnx_convgrad.checking.torch_shapes import DTYPES, LAYOUT, NotRebuilt, padded
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.clamps import bound_of, excludes_bounds
from onnx_convgrad.ir.convolution import conv_window, window
from onnx_convgrad.ir.pooling import Pool

# -- windows -----------------------------------------------------------------------------------------------------------


def _of_rank(function: str, rank: int, n: Call) -> Any:
    if not 1 <= rank <= 3:
        raise NotRebuilt(f"{n.node.op_type} in {rank} dimensions")
    return getattr(F, f"{function}{rank}d")


def _conv(n: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    data, weight = (ir.Value(shape=ir.Shape(v.shape)) for v in (x, w))
    win = conv_window(n, data, weight, rank)
    assert win is not None, "all sizes are known"
    wide = padded(x, win.begin, win.end)
    result: Tensor = _of_rank("conv", rank, n)(wide, w, b, win.strides, 0, win.dilations, win.group)
    return result


def _conv_transpose(n: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The full transposed convolution, trimmed at both ends; `output_padding` and `output_shape` only move the trim."""
    rank = x.dim() - 2
    win, extra = window(n, rank), n.ints("output_padding") or (0,) * rank
    full: Tensor = _of_rank("conv_transpose", rank, n)(x, w, None, win.strides, 0, 0, win.group, win.dilations)
    wanted, auto = n.ints("output_shape"), n.string("auto_pad", "NOTSET")
    if wanted is None and auto.startswith("SAME"):
        wanted = tuple(size * s for size, s in zip(x.shape[2:], win.strides, strict=True))
    for i in range(rank):
        size = full.shape[2 + i] + extra[i]
        begin, end = win.begin[i], win.end[i]
        if wanted is not None:
            total = max(size - wanted[i], 0)
            begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
            end = size - wanted[i] - begin
        tail = extra[i] - end
        full = padded(full, [0] * i + [-begin] + [0] * (rank - i - 1), [0] * i + [tail] + [0] * (rank - i - 1))
    return full if b is None else full + b.reshape(1, -1, *[1] * rank)


def _pool(n: Call, x: Tensor) -> tuple[Pool, list[int], list[int], list[int]]:
    """The windows, begin and end pads, and the rows by which `ceil_mode` lets the last window reach beyond those."""
    pool = Pool.of(n, ir.Value(shape=ir.Shape(x.shape)))
    pads = pool.pads or ()
    beyond = [max(pool.excess(axis) or 0, 0) for axis in range(pool.rank)]
    return pool, [begin for begin, _ in pads], [end for _, end in pads], beyond


def _max_pool(n: Call, x: Tensor) -> Tensor:
    if len(n.node.outputs) > 1 and n.node.outputs[1].name:
        raise NotRebuilt("MaxPool with indices")
    pool, begin, end, beyond = _pool(n, x)
    wide = padded(x, begin, [e + more for e, more in zip(end, beyond, strict=True)], -math.inf)
    result: Tensor = _of_rank("max_pool", pool.rank, n)(wide, pool.kernel, pool.strides, 0, pool.dilations)
    return result


def _average_pool(n: Call, x: Tensor) -> Tensor:
    pool, begin, end, beyond = _pool(n, x)
    if any(d != 1 for d in pool.dilations):
        raise NotRebuilt("AveragePool with dilations")
    average = _of_rank("avg_pool", pool.rank, n)
    inner = torch.ones_like(x[:1, :1])
    counted = padded(inner, begin, end, 1.0 if n.int("count_include_pad", 0) else 0.0)
    none = [0] * pool.rank
    share = average(padded(counted, none, beyond), pool.kernel, pool.strides)
    result: Tensor = average(padded(padded(x, begin, end), none, beyond), pool.kernel, pool.strides) / share
    return result


def _spatial(x: Tensor) -> list[int]:
    return list(range(2, x.dim()))


# -- normalization -----------------------------------------------------------------------------------------------------


def _batch_norm(n: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    shape = (1, -1, *[1] * (x.dim() - 2))
    epsilon = n.float("epsilon", 1e-5)
    if not n.int("training_mode", 0):
        normal = (x - mean.reshape(shape)) / torch.sqrt(var.reshape(shape) + epsilon)
        return normal * scale.reshape(shape) + bias.reshape(shape)
    axes, keep = [0, *_spatial(x)], n.float("momentum", 0.9)
    m, v = x.mean(axes), x.var(axes, unbiased=False)
    normal = (x - m.reshape(shape)) / torch.sqrt(v.reshape(shape) + epsilon)
    return (
        normal * scale.reshape(shape) + bias.reshape(shape),
        keep * mean + (1 - keep) * m,
        keep * var + (1 - keep) * v,
    )


def _layer_norm(n: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis = n.int("axis", -1) % x.dim()
    axes = list(range(axis, x.dim()))
    mean, var = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
    inverse = 1 / torch.sqrt(var + n.float("epsilon", 1e-5))
    y = (x - mean) * inverse * scale
    return (y if bias is None else y + bias), mean, inverse


def _group_norm(n: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = x.shape[1] if n.node.op_type == "InstanceNormalization" else n.int("num_groups", 1)
    return torch.group_norm(x, groups, scale, bias, n.float("epsilon", 1e-5))


def _lrn(n: Call, x: Tensor) -> Tensor:
    size = n.int("size", 1)
    before = (size - 1) // 2
    squares = F.pad((x * x).transpose(1, -1), (before, size - 1 - before)).unfold(-1, size, 1).sum(-1).transpose(1, -1)
    return x / (n.float("bias", 1.0) + n.float("alpha", 1e-4) / size * squares) ** n.float("beta", 0.75)


# -- elementwise -------------------------------------------------------------------------------------------------------


def _clip(n: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return _clamp(n, x, low, high, *(v for v in (n.get("min"), n.get("max"))))


def _clamp(
    n: Call, x: Tensor, low: Tensor | None, high: Tensor | None, least: ir.Value | None, most: ir.Value | None
) -> Tensor:
    """Bound x by numbers, which are the operands `least` and `most` of the node."""
    if low is None and high is None:
        return x
    if excludes_bounds(n, least, most):
        return F.hardtanh(x, -math.inf if low is None else float(low), math.inf if high is None else float(high))
    return torch.clamp(x, *(None if bound is None else bound.to(x.dtype) for bound in (low, high)))


def _extremum(n: Call, *xs: Tensor) -> Tensor:
    bound, largest = bound_of(n), n.node.op_type == "Max"
    if bound is None:
        return _fold(torch.maximum if largest else torch.minimum)(n, *xs)
    x, limit = xs if bound is n.inputs[1] else xs[::-1]
    return _clamp(n, x, limit, None, bound, None) if largest else _clamp(n, x, None, limit, None, bound)


def _cast(n: Call, x: Tensor) -> Tensor:
    to = n.int("to", 1)
    if to in (1, 10, 11, 16):
        return x if x.is_floating_point() else x.to(torch.get_default_dtype())
    if to not in DTYPES:
        raise NotRebuilt(f"Cast to type {to}")
    return x.to(DTYPES[to])


def _dropout(n: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> Any:
    if training is not None and bool(training) and (ratio is None or float(ratio) > 0):
        raise NotRebuilt("Dropout in training mode")
    return x, torch.ones_like(x, dtype=torch.bool)


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(n: Call, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = function(total, x)
        return total

    return run


def _gemm(n: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if n.int("transA", 0) else a
    b = b.T if n.int("transB", 0) else b
    y = n.float("alpha", 1.0) * (a @ b)
    return y if c is None else y + n.float("beta", 1.0) * c


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the operands alone."""
    return lambda n, *xs: function(*xs)


OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(torch, name.lower())) for name in "Relu Sigmoid Tanh Exp Log Sqrt Abs Neg Erf Sin".split()},
    **{name: _plain(getattr(torch, name.lower())) for name in "Floor Ceil Round Sign Cos Tan Asin Acos Atan".split()},
    **{name: _plain(getattr(torch, name.lower())) for name in "Sinh Cosh Asinh Acosh Atanh Reciprocal".split()},
    **{name: _plain(getattr(torch, name.lower())) for name in "Add Sub Mul MatMul Pow".split()},
    **{name: _plain(getattr(torch, f"logical_{name.lower()}")) for name in "And Or Xor Not".split()},
    "Equal": _plain(torch.eq),
    "Greater": _plain(torch.gt),
    "Less": _plain(torch.lt),
    "GreaterOrEqual": _plain(torch.ge),
    "LessOrEqual": _plain(torch.le),
    "Identity": lambda n, x: x,
    "Softplus": lambda n, x: torch.logaddexp(x, torch.zeros_like(x)),
    "Softsign": _plain(F.softsign),
    "Mish": lambda n, x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
    "HardSwish": lambda n, x: x * torch.clamp(x / 6 + 0.5, 0, 1),
    "GlobalAveragePool": lambda n, x: x.mean(_spatial(x), keepdim=True),
    "GlobalMaxPool": lambda n, x: x.flatten(2).max(-1)[0].reshape(*x.shape[:2], *(1 for _ in _spatial(x))),
    **LAYOUT,
    "Div": lambda n, a, b: torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc"),
    "Mod": lambda n, a, b: torch.fmod(a, b) if n.int("fmod", 0) else torch.remainder(a, b),
    "Min": _extremum,
    "Max": _extremum,
    "Sum": _fold(torch.add),
    "Mean": lambda n, *xs: _fold(torch.add)(n, *xs) / len(xs),
    "Where": lambda n, c, a, b: torch.where(c, a, b),
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": lambda n, x, like: x if x.is_floating_point() and like.is_floating_point() else x.to(like.dtype),
    "PRelu": lambda n, x, slope: torch.where(x > 0, x, x * slope),
    "Dropout": _dropout,
    "LeakyRelu": lambda n, x: torch.where(x > 0, x, n.float("alpha", 0.01) * x),
    "Elu": lambda n, x: torch.where(x > 0, x, n.float("alpha", 1.0) * torch.expm1(x.clamp(max=0))),
    "Celu": lambda n, x: F.celu(x, n.float("alpha", 1.0)),
    "Selu": lambda n, x: (
        n.float("gamma", 1.0507009873554805)
        * torch.where(x > 0, x, n.float("alpha", 1.6732632423543772) * torch.expm1(x.clamp(max=0)))
    ),
    "HardSigmoid": lambda n, x: F.hardtanh(n.float("alpha", 0.2) * x + n.float("beta", 0.5), 0, 1),
    "ThresholdedRelu": lambda n, x: torch.where(x > n.float("alpha", 1.0), x, torch.zeros_like(x)),
    "Gelu": lambda n, x: F.gelu(x, approximate=n.string("approximate", "none")),
    "Gemm": _gemm,
    "Einsum": lambda n, *xs: torch.einsum(n.string("equation", ""), *xs),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "LRN": _lrn,
    "LpNormalization": lambda n, x: x / torch.linalg.vector_norm(x, n.int("p", 2), n.int("axis", -1), keepdim=True),
    "Softmax": lambda n, x: torch.softmax(x, n.int("axis", -1)),
    "LogSoftmax": lambda n, x: torch.log_softmax(x, n.int("axis", -1)),
}
"""Operator -> its implementation in PyTorch."""


def torch_gradients(
    model: ir.Model,
    feed: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    wrt: Sequence[str],
    *,
    double: bool = True,
) -> dict[str, np.ndarray] | str:
    """Compute the gradients of sum <output, cotangent> for the values `wrt`.

    Args:
        model: A model in canonical form.
        feed: Its inputs.
        cotangents: Differentiated value -> cotangent.
        wrt: Inputs, initializers or intermediate values.
        double: Compute in float64 rather than float32.

    Returns:
        Value -> gradient, or the reason why the model was not rebuilt.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        values = _forward(model, feed, set(wrt))
        loss = sum((values[t] * torch.tensor(s).to(values[t].dtype)).sum() for t, s in cotangents.items())
        leaves = [values[name] for name in wrt]
        assert isinstance(loss, torch.Tensor)
        if not loss.requires_grad:
            return {name: np.zeros(tuple(v.shape)) for name, v in zip(wrt, leaves, strict=True)}
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return {
            name: np.zeros(tuple(v.shape)) if g is None else g.detach().numpy()
            for name, v, g in zip(wrt, leaves, gradients, strict=True)
        }
    except NotRebuilt as missing:
        return f"not rebuilt ({missing})"
    except (RuntimeError, IndexError, TypeError, ValueError) as problem:
        return f"not rebuilt ({str(problem).splitlines()[0]})"
    finally:
        torch.set_default_dtype(before)


def _tensor(array: np.ndarray, leaf: bool) -> Any:
    floats = array.dtype.kind == "f" or "float" in array.dtype.name
    result = torch.tensor(array.astype(np.float64) if floats else array)
    result = result.to(torch.get_default_dtype()) if floats else result
    return result.requires_grad_() if leaf else result


def _forward(model: ir.Model, feed: Mapping[str, np.ndarray], wrt: set[str]) -> dict[str, Any]:
    """Compute every value of the main graph, by name."""
    graph = model.graph
    missing = sorted({n.op_type for n in graph if n.domain or n.op_type not in OPERATORS})
    if missing:
        raise NotRebuilt(f"operator {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}")
    values: dict[str, Any] = {name: _tensor(array, name in wrt) for name, array in feed.items()}
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            values.setdefault(name, _tensor(value.const_value.numpy(), name in wrt))
    for node in graph:
        inputs = [None if v is None or not v.name else values[v.name] for v in node.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        results = OPERATORS[node.op_type](Call(node), *inputs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for value, result in zip(node.outputs, results, strict=False):
            if value.name:
                # A value in `wrt` that depends on no other of them becomes a leaf.
                fresh = value.name in wrt and not result.requires_grad
                values[value.name] = result.detach().requires_grad_() if fresh else result
    return values
