"""The value that a loss reads: an output, or what its final Softmax or Sigmoid is computed from.

Most deployed classifiers end in probabilities. A loss on logits would apply its Softmax a second time, and train badly
without an error; so it reads the value before. Changes of layout and type behind the activation are repeated on that value.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.endings import Ending
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.ranges import excludes_classes, is_probability

_TINY = {False: 1e-37, True: 6e-8}
"""Smallest probability whose logarithm is read, by whether it is float16."""


def meaning_of(y: ir.Value) -> str:
    """The activation that a value ends in, or the one whose probabilities it pools, averages or selects; else nothing."""
    ending = Ending.of(y)
    if ending.activation or ending.last is None or not is_probability(ending.last.outputs[0]):
        return ending.activation
    return "Softmax" if excludes_classes(ending.last.outputs[0]) else "Sigmoid"


def value_read(y: ir.Value, loss: Loss, name: str) -> ir.Value:
    """The value that a loss of an output reads: the output, or the value before its last activation, with a warning.

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
