"""An ONNX file as a JAX function (tool: may change in a minor version).

For example `onnx_convgrad.jax.call("model.onnx")`. ONNX Runtime computes the function and its gradients, of
any order in reverse mode, by graphs that this package builds on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.optional import install
from onnx_convgrad.errors import ArgumentError, ExecutionError, ModelError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.pipeline.layer import Layer, layer_of
from onnx_convgrad.pipeline.options import Names, TargetLike
from onnx_convgrad.runtime import Providers, SessionOptionsLike

try:
    import jax
except ImportError:
    raise ExecutionError("JAX is not installed.", hint=f"Install it with {install('jax')}.") from None

__all__ = ["call"]


@typed_errors
def call(
    model: AnyModel,
    *,
    wrt: Names | None = None,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
    target: TargetLike = "cpu",
) -> Any:
    """Turn a model into a function of JAX arrays that `jax.grad`, `jax.vjp` and `jax.jit` accept.

    Calls leave JAX by `jax.pure_callback`. The shapes of the results must follow from those of the operands by the symbols
    that the model declares. Derivatives are those of reverse mode (`jax.custom_vjp`), of any order; forward mode and `vmap`
    over the function are refused by JAX or run it once per member.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        wrt: Stored values that become operands, as for `onnx_convgrad.augment`; `None` leaves all in the graph.
        providers: Execution providers, as for `onnx_convgrad.session`; the CPU by default.
        options: Session options, as there.
        target: As for `onnx_convgrad.augment`.

    Returns:
        A function that takes the inputs in the order of the file, then, with `wrt`, a dict of the chosen values by name. It
        returns an array, or a tuple of several. Its attribute `parameters` holds the stored values.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or brought to opset 21.
        ExecutionError: ONNX Runtime or a provider is missing.
    """
    layer, stored = layer_of(model, wrt, target, providers=providers, options=options)
    function = _differentiable(layer)
    count = len(layer.inputs) - len(stored)

    def run(*inputs: Any, **named: Any) -> Any:
        operands = [*inputs]
        if wrt is not None:
            values = operands.pop() if len(operands) == count + 1 else named.pop("parameters", None)
            if not isinstance(values, dict) or set(values) != set(stored):
                raise ArgumentError(f"The last operand must be a dict with {', '.join(stored)}.")
            operands += [values[name] for name in stored]
        if len(operands) != len(layer.inputs) or named:
            raise ArgumentError(f"The function takes {', '.join(layer.inputs[:count])}, not {len(inputs)} operands.")
        results = function(*map(jax.numpy.asarray, operands))
        return results[0] if len(results) == 1 else tuple(results)

    run.parameters = {name: jax.numpy.asarray(array) for name, array in stored.items()}  # type: ignore[attr-defined]
    return run


def _differentiable(layer: Layer) -> Callable[..., Any]:
    """A function of operands whose derivative is a call of another layer."""
    wanted = tuple(i for i, d in enumerate(layer.differentiable) if d)

    def plain(*operands: Any) -> Any:
        shapes = _results(layer, operands)

        def run(*operands: Any) -> tuple[np.ndarray, ...]:
            feed = {name: np.asarray(x) for name, x in zip(layer.inputs, operands, strict=True)}
            try:
                results = layer.session.run(layer.outputs, feed)
            except Exception as problem:
                raise ExecutionError(f"ONNX Runtime could not run the function: {problem}") from problem
            return tuple(np.asarray(y, s.dtype) for y, s in zip(results, shapes, strict=True))

        return jax.pure_callback(run, shapes, *operands, vmap_method="sequential")

    function = jax.custom_vjp(plain)

    def backward(operands: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        floating = [c for c, f in zip(cotangents, layer.floating, strict=True) if f]
        found = dict(zip(wanted, _differentiable(layer.vjp(wanted))(*operands, *floating), strict=True))
        zeros = jax.dtypes.float0
        return tuple(found[i] if i in found else np.zeros(x.shape, zeros) for i, x in enumerate(operands))

    function.defvjp(lambda *operands: (function(*operands), operands), backward)  # itself differentiable again
    return function  # type: ignore[no-any-return]


def _results(layer: Layer, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes and dtypes of the results, from the declared shapes and those of the operands.

    Raises:
        ModelError: A size is not declared.
    """
    graph = layer.model.graph
    sizes: dict[str, int] = {}
    for value, operand in zip(graph.inputs, operands, strict=True):
        for d, size in zip(value.shape or (), operand.shape, strict=False):
            if not isinstance(d, int) and d.value is not None:
                sizes.setdefault(d.value, size)
    shapes = []
    for y in graph.outputs:
        dims = [d if isinstance(d, int) else sizes.get(d.value or "") for d in y.shape or [ir.SymbolicDim(None)]]
        if None in dims:
            raise ModelError(
                f"The shape of {y.name!r}, {y.shape}, does not follow from those of the operands.",
                hint="Give the shapes of the inputs with input_shapes.",
            )
        shapes.append(jax.ShapeDtypeStruct(tuple(dims), (y.dtype or ir.DataType.FLOAT).numpy()))
    return tuple(shapes)
