"""Rebuild a canonical graph in PyTorch and compute its gradients with autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnx_convgrad.checking.torch_operators import OPERATORS
from onnx_convgrad.checking.torch_shapes import NotRebuilt
from onnx_convgrad.ir.call import Call


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
