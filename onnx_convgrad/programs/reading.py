"""The value that a loss reads: an output, or what its final Softmax or Sigmoid is computed from.

Most deployed classifiers end in probabilities. A loss on logits would apply its Softmax a second time, and train badly
without an error; so it reads the value before. Changes of layout and type behind the activation are repeated on that value.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.axes import kept_axes
from onnx_convgrad.autodiff.facts import arranges
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import known, static_product
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.ranges import excludes_classes, is_probability

_PRODUCTS = ("Gemm", "MatMul", "Conv")
_TINY = {False: 1e-37, True: 6e-8}
"""Smallest probability whose logarithm is read, by whether it is float16."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last nodes before a value.

    Attributes:
        last: The node that computes the numbers, if there is one.
        layout: The nodes behind it, which move or cast numbers, in order.
    """

    last: ir.Node | None
    layout: tuple[ir.Node, ...]

    @classmethod
    def of(cls, y: ir.Value) -> Ending:
        """Follow a value back to the node that computes its numbers."""
        layout: list[ir.Node] = []
        value: ir.Value | None = y
        while value is not None and (node := value.producer()) is not None and arranges(node):
            layout.insert(0, node)
            value = node.inputs[0]
        return cls(None if value is None else value.producer(), tuple(layout))

    @property
    def activation(self) -> str:
        """`"Softmax"`, `"LogSoftmax"`, `"Sigmoid"`, or nothing."""
        return self.last.op_type if is_op(self.last, "Softmax", "LogSoftmax", "Sigmoid") else ""

    @property
    def meaning(self) -> str:
        """The activation, or the one whose probabilities were pooled, averaged or selected."""
        if self.activation or self.last is None or not is_probability(self.last.outputs[0]):
            return self.activation
        return "Softmax" if excludes_classes(self.last.outputs[0]) else "Sigmoid"

    @property
    def is_product(self) -> bool:
        """Whether the numbers come right from a product with weights, perhaps with a bias."""
        before = [self.last]
        if is_op(self.last, "Add"):
            before = [v.producer() for v in self.last.inputs if v is not None]
        return any(is_op(node, *_PRODUCTS) for node in before)

    def axis(self) -> int | None:
        """The axis of the output along which the activation normalizes; `None` if it cannot be followed."""
        shape = None if self.last is None else self.last.outputs[0].shape
        if self.last is None or shape is None or not len(shape):
            return None
        axis: int | None = Call(self.last).int("axis", -1) % len(shape)
        for node in self.layout:
            axis = None if axis is None else _moved(node, axis)
        return axis


def _moved(node: ir.Node, axis: int) -> int | None:
    """The axis of the result that an axis of the operand becomes; `None` if that is unknown, or it is mixed with others."""
    if places := kept_axes(node):
        return places[axis]
    before, after = node.inputs[0].shape if node.inputs[0] is not None else None, node.outputs[0].shape
    if before is None or after is None:
        return None
    size, behind = known(before[axis]), static_product(before[axis + 1 :])
    if size is None or behind is None:
        return None
    found = [i for i, d in enumerate(after) if known(d) == size and static_product(after[i + 1 :]) == behind]
    return found[0] if len(found) == 1 else None


def value_read(y: ir.Value, loss: Loss, name: str) -> ir.Value:
    """The value of the model that a loss of `y` reads: `y`, or the one before its last activation, with a warning.

    Args:
        y: An output.
        loss: Its loss.
        name: Name of the loss, for messages.

    Raises:
        ArgumentError: The loss does not fit the activation, or the axis of its classes is unknown.
    """
    ending, takes = Ending.of(y), loss.takes
    activation = ending.activation
    if not takes:
        return y
    if takes == "probabilities":
        _check_probabilities(ending, y, name)
        return y
    if not activation:
        if is_probability(y):
            _tell_of_probabilities(y, takes, name)
        elif takes == "log-probabilities" and ending.is_product:
            warn(
                f"The loss {name} takes log-probabilities, and {y.name!r} comes right from a product with weights, as "
                "logits do. If these are logits, use the loss cross_entropy."
            )
        return y
    assert ending.last is not None
    source = ending.last.inputs[0]
    assert source is not None
    remedy = f"To read a certain value anyway, name it: loss={{{source.name!r}: ...}}, or --loss {source.name}=NAME."
    if takes == "binary logits" and activation != "Sigmoid":
        raise ArgumentError(
            f"The loss {name} takes the logits of independent classes, but the output {y.name!r} ends in {activation}, "
            "which makes its classes exclude each other.",
            hint=f"Use the loss cross_entropy. {remedy}",
        )
    if takes == "log-probabilities" and activation == "Sigmoid":
        raise ArgumentError(
            f"The loss {name} takes log-probabilities, but the output {y.name!r} ends in Sigmoid.",
            hint=f"Use the loss bce_with_logits for independent classes, or cross_entropy for exclusive ones. {remedy}",
        )
    if activation != "Sigmoid":
        _check_axis(ending, y, loss, name, remedy)
    if activation == "LogSoftmax":
        return y
    reads = f"the LogSoftmax of {source.name!r}" if takes == "log-probabilities" else f"{source.name!r}"
    text = f"The output {y.name!r} ends in {activation}, and the loss {name} takes {takes}: "
    text += f"it reads {reads}, the value before it."
    if takes == "logits" and activation == "Sigmoid":
        text += " The model keeps its Sigmoid: the largest output is still the predicted "
        text += "class, but the outputs do not add up to 1."
    warn(text)
    return source


def _check_probabilities(ending: Ending, y: ir.Value, name: str) -> None:
    """Refuse logits and logarithms where a loss takes probabilities; tell of numbers that may be anything."""
    logarithm = ending.activation == "LogSoftmax"
    if logarithm or (ending.is_product and not is_probability(y)):
        found = "ends in LogSoftmax" if logarithm else "comes right from a product with weights, as logits do"
        raise ArgumentError(
            f"The loss {name} takes probabilities, and the output {y.name!r} {found}.",
            hint=f"Use the loss {'nll' if logarithm else 'bce_with_logits'}.",
        )
    if not is_probability(y):
        warn(
            f"The loss {name} takes probabilities, and the nodes of {y.name!r} do not show that its numbers are between "
            "0 and 1. If these are logits, use the loss bce_with_logits."
        )


def _tell_of_probabilities(y: ir.Value, takes: str, name: str) -> None:
    """Refuse probabilities where a loss takes logits; tell that it reads their logarithm where it takes that."""
    text = f"The numbers of the output {y.name!r} are between 0 and 1, as probabilities are, and the loss {name} takes "
    if takes == "log-probabilities":
        warn(f"{text}log-probabilities: it reads the logarithm of the output.")
        return
    uses = {
        "binary logits": "Use the loss bce, which takes probabilities, or name",
        "logits": "Use the loss nll, which reads their logarithm, or name",
    }
    use = "Name" if name == "ctc" else uses[takes]
    raise ArgumentError(
        f"{text}{takes}.", hint=f"{use} the value with the logits: loss={{VALUE: ...}}, --loss VALUE=NAME."
    )


def _check_axis(ending: Ending, y: ir.Value, loss: Loss, name: str, remedy: str) -> None:
    """Raise `ArgumentError` unless the classes of the loss are those of the activation."""
    axis, wanted = ending.axis(), loss.axis_of(y)
    activation = ending.activation
    if axis is None:
        raise ArgumentError(
            f"The output {y.name!r} ends in {activation}, and the nodes behind it may mix its classes: the loss {name} "
            "does not know which value to read.",
            hint=remedy,
        )
    if axis != wanted:
        back = axis - len(y.shape or ())
        option = f"Give axis={back}: og.losses.{type(loss).__name__}(axis={back}), or --loss-option axis={back}."
        raise ArgumentError(
            f"The output {y.name!r} of shape {y.shape} ends in {activation} along axis {axis}, but the loss {name} has its "
            f"classes along axis {wanted}.",
            hint=option if hasattr(loss, "axis") else remedy,
        )


def read(e: Emitter, y: ir.Value, loss: Loss, reads: str) -> ir.Value:
    """Emit the value for a loss: `y`, or its layout on the value `reads` before its activation."""
    ending = Ending.of(y)
    source = None if ending.last is None or not ending.last.inputs else ending.last.inputs[0]
    if loss.takes == "log-probabilities" and not ending.activation and is_probability(y):
        return e.typed(e.op("Log", e.op("Max", y, e.scalar(_TINY[y.dtype == ir.DataType.FLOAT16], y))), y)
    if source is None or y.name == reads:
        return y
    value = source
    if loss.takes == "log-probabilities":
        value = e.op("LogSoftmax", value, axis=Call(ending.last).int("axis", -1))  # type: ignore[arg-type]
    for node in ending.layout:
        value = e.op(node.op_type, value, *node.inputs[1:], **Call(node).attributes())
    return value if value is source else e.typed(value, y)
