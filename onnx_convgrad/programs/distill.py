"""The loss of a student: its own labels, and the predictions of a teacher."""

from __future__ import annotations

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.losses.divergence import KLDiv
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.terms import LOSSES, Term


@typed_errors
def distillation(
    loss: str | Loss, *, weight: float = 0.5, temperature: float = 4.0, axis: int = 1, output: str | None = None
) -> list[Term]:
    """(1 - weight) times a loss of the labels, plus `weight` times the divergence from the logits in the input `teacher`.

    Hinton et al. (2015). `onnx_convgrad.data.with_teacher` makes the data of such a program.

    Args:
        loss: The loss of the labels in the input `target`: a name or a member of `onnx_convgrad.losses`.
        weight: Share of the teacher in the loss, from 0 to 1.
        temperature: Temperature that softens both predictions. See `KLDiv`, whose reduction is `"batchmean"`.
        axis: Axis of the classes.
        output: Output of the model; by default its only one.

    Raises:
        ArgumentError: An argument is not one of those.
    """
    share(weight, "weight")
    if isinstance(loss, str):
        check_names([loss], list(LOSSES), "loss")
        loss = LOSSES[loss]()
    if not isinstance(loss, Loss):
        raise ArgumentError(f"distillation takes a loss by name or a member of onnx_convgrad.losses, not {loss!r}.")
    taught = KLDiv(temperature=temperature, axis=axis, reduction="batchmean")
    return [Term(loss, output, 1 - weight, "target"), Term(taught, output, weight, "teacher")]
