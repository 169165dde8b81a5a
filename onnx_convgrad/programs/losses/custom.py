"""Losses written by callers: functions that emit nodes, and onnxscript functions, whose nodes are inlined into the graph.

`onnxscript` is never imported here: an `OnnxFunction` only exists where the caller has imported it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.names import as_names
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.emit import Emitter, empty_graph
from onnx_convgrad.ir.loop_bodies import emit_once
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.programs.losses.elementwise import Loss, Spec, WrongTargetError, reduce


def is_onnxscript(function: object) -> TypeGuard[Any]:
    """Whether an object is an `onnxscript.OnnxFunction`; `Any`, because the package may not be installed."""
    module = sys.modules.get("onnxscript")
    return isinstance(function, getattr(module, "OnnxFunction", ()))


class ScriptLoss:
    """Emits the nodes of an `onnxscript.OnnxFunction` with the inputs `prediction` and `target` and one output.

    Raises:
        ArgumentError: The function has other inputs or outputs, or required attributes.
    """

    def __init__(self, function: Any) -> None:  # an OnnxFunction, see `is_onnxscript`
        self.__qualname__ = self.name = function.name
        try:
            self.model = ir.from_proto(function.to_model_proto())
        except ValueError as problem:
            raise self._error(str(problem)) from problem
        counts = len(self.model.graph.inputs), len(self.model.graph.outputs)
        if counts != (2, 1):
            raise self._error(f"It has {counts[0]} inputs and {counts[1]} outputs.")

    @property
    def classes(self) -> Spec | None:
        """Dtype and shape of the labels, if the function declares integers."""
        port = self.model.graph.inputs[1]
        return (port.dtype, port.shape) if port.dtype is not None and port.dtype.is_integer() else None

    def __call__(self, e: Emitter, *operands: ir.Value) -> ir.Value:
        """Inline the function at the emitter; operators are converted to the canonical opset."""
        model = self.model.clone()
        for port, value in zip(model.graph.inputs, operands, strict=True):
            port.type = value.type
            port.shape = None if value.shape is None else value.shape.copy()  # canonicalization changes shapes
        try:
            graph = canonicalize(model).graph
        except ModelError as problem:
            raise self._error(problem.message) from problem
        for node in graph:
            if any(subgraphs(node)):
                raise self._error(f"It has control flow ({node.op_type}).")
        return emit_once(e, graph, operands)[0]

    def _error(self, reason: str) -> ArgumentError:
        return ArgumentError(
            f"The onnxscript function {self.name!r} cannot be used as a loss. {reason}",
            hint="A loss takes a prediction and the labels and returns one value.",
        )


@dataclass(frozen=True, eq=False)
class Custom(Loss):
    """A custom loss: a function `(e, y, target) -> value`, or `(e, y) -> value` without labels.

    Further arguments of the function are further labels, such as a mask or weights: `(e, y, target, mask)` adds the input
    `target_mask`.

    Args:
        function: Emits the loss with the `Emitter` `e`; or an onnxscript function `(prediction, target) -> loss`, whose
            nodes are inlined. Entries are reduced; a pair `(total, count)` is one divided by the other.
        reads: Name, or names, of the values that the function takes in place of one output: outputs, inputs, parameters or
            inner values of the model, in the order of its arguments. A function of any number of arguments takes no labels
            then.
        dtype: numpy dtype of the labels; by default that of the losses which the function calls, or else of the output. A
            mapping gives it by the names of the arguments.
        shape: Sizes and names of the labels' dimensions; by default likewise.
    """

    function: Callable[..., ir.Value] = field(kw_only=False)
    reads: Sequence[str] = ()
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None
    shape: Sequence[int | str | None] | Mapping[str, Sequence[int | str | None]] | None = None

    def check(self) -> None:
        object.__setattr__(self, "reads", as_names(self.reads, "reads"))
        if is_onnxscript(self.function):
            object.__setattr__(self, "function", ScriptLoss(self.function))
            return
        for p in self._parameters():
            if p.kind == p.KEYWORD_ONLY and p.default is p.empty:
                raise ArgumentError(
                    f"The loss function takes {p.name!r} by name alone, and values are given in order.",
                    hint="Put it before the star, or give it a default.",
                )
        if not any(p.kind == p.VAR_POSITIONAL for p in self._parameters()):
            required, values = self._required(), max(1, len(self.reads))
            if len(required) <= values:
                taken = "the output" if values == 1 else f"the {values} values that it reads"
                raise ArgumentError(
                    f"A loss function takes an Emitter, {taken} and perhaps the labels, not ({', '.join(required)}).",
                    hint="Its options have defaults.",
                )

    @property
    def also(self) -> Sequence[str]:
        return self.reads[1:]

    def target(self, y: ir.Value) -> Spec:
        first = next(iter(self._labels()), "target")
        return self._spec(first, lambda: self._usual_target(y))

    def more_targets(self, y: ir.Value) -> dict[str, Spec]:
        return {name: self._spec(name, lambda: (y.dtype, y.shape)) for name in self._labels()[1:]}

    def _spec(self, name: str, usual: Callable[[], tuple[ir.DataType | None, ir.Shape | None]]) -> Spec:
        """The dtype and the shape of the labels of this name: as stated, or else the usual ones."""
        stated: Any = self.dtype.get(name) if isinstance(self.dtype, Mapping) else self.dtype
        sizes = self.shape.get(name) if isinstance(self.shape, Mapping) else self.shape
        dtype, shape = usual() if stated is None or sizes is None else (None, None)
        dtype = dtype if stated is None else ir.DataType.from_numpy(np.dtype(stated))
        return dtype or ir.DataType.FLOAT, shape if sizes is None else ir.Shape(sizes)

    def called(self, y: ir.Value) -> Loss:
        problem = self._tried(y)
        return self if problem is None or self.dtype is not None else problem.loss

    def _usual_target(self, y: ir.Value) -> Spec:
        """The labels of the losses that the function calls, or else that of an output."""
        if isinstance(self.function, ScriptLoss) and self.function.classes is not None:
            return self.function.classes
        problem = self._tried(y)
        return (y.dtype or ir.DataType.FLOAT, y.shape) if problem is None else problem.spec

    def _tried(self, y: ir.Value) -> WrongTargetError | None:
        """The refusal of a loss that the function calls with labels like an output; `None` if none objects."""
        graph = empty_graph("trial")
        names = self._required()[1:] or ("output", "target")
        operands = [ir.Value(name=name, type=y.type, shape=y.shape) for name in names]
        graph.inputs.extend(operands)
        try:
            self.function(Emitter(graph), *operands)
        except WrongTargetError as problem:
            return problem
        except Exception:  # noqa: BLE001 - raised again where the loss is emitted
            return None
        return None

    @property
    def has_target(self) -> bool:
        """Whether the function takes labels."""
        any_number = len(self._required()) <= 1  # of arguments: labels, too, unless it says what it reads
        return bool(self._labels()) or (any_number and (isinstance(self.function, ScriptLoss) or not self.reads))

    def label_count(self, y: ir.Value) -> int:
        return 1 + len(self.more_targets(y)) if self.has_target else 0

    def _labels(self) -> list[str]:
        """Names of the arguments behind the emitter and the values."""
        return self._required()[1 + max(1, len(self.reads)) :]

    def _required(self) -> list[str]:
        """Names of the arguments of the function that have no default."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in self._parameters() if p.kind in positional and p.default is p.empty]

    def _parameters(self) -> Iterable[inspect.Parameter]:
        try:
            return inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError) as problem:
            raise ArgumentError(f"The function of a loss cannot be used: {problem}.") from None

    def __call__(self, e: Emitter, y: ir.Value, *others: ir.Value) -> Any:  # as the function returns it
        with CallersCode(self.function):
            value = self.function(e, y, *others)
        return reduce(e, value, self.reduction) if isinstance(value, ir.Value) else value

    def to_json(self) -> dict[str, Any]:
        changed: dict[str, Any] = {} if self.reduction == "mean" else {"reduction": self.reduction}
        changed |= {"sample_weight": True} if self.sample_weight else {}
        changed |= {"reads": list(self.reads)} if self.reads else {}
        return {**changed, "function": getattr(self.function, "__qualname__", repr(self.function))}
