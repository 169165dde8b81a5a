"""Resolve the argument `loss` of a training program to weighted terms, each of one value of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, TypeAlias

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.base.numbers import share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.programs.losses.cross_entropy import NLL, CrossEntropy, KLDiv
from onnx_convgrad.programs.losses.ctc import CTC
from onnx_convgrad.programs.losses.custom import Custom
from onnx_convgrad.programs.losses.elementwise import (
    BCE,
    L1,
    MSE,
    BCEWithLogits,
    Huber,
    Loss,
    Spec,
)
from onnx_convgrad.programs.losses.embedding import Contrastive, Triplet
from onnx_convgrad.programs.losses.focal import BinaryDice, Dice, Focal, SigmoidFocal
from onnx_convgrad.programs.losses.sample_weight import SAMPLE_WEIGHT
from onnx_convgrad.programs.optim.schedules import Schedule
from onnx_convgrad.programs.reading import value_read

LOSSES: dict[str, type[Loss]] = {
    "mse": MSE,
    "l1": L1,
    "huber": Huber,
    "cross_entropy": CrossEntropy,
    "nll": NLL,
    "bce_with_logits": BCEWithLogits,
    "bce": BCE,
    "focal": Focal,
    "sigmoid_focal": SigmoidFocal,
    "dice": Dice,
    "binary_dice": BinaryDice,
    "ctc": CTC,
    "kl_div": KLDiv,
    "triplet": Triplet,
    "contrastive": Contrastive,
}
"""Losses by name."""

_HINT = f"Losses by name: {', '.join(LOSSES)}."


@dataclass(frozen=True, slots=True)
class Term:
    """A loss of one value of the model.

    Args:
        loss: The loss; `None` if the value itself is one.
        output: Name of the value.
        weight: Factor in the sum of all terms; a schedule changes it with the step, and makes it an input of the graphs.
        target: Name of the graph input for the labels; by default `target`, or `<output>_target` if there are several.
        reads: Name of the value that the loss reads: the output, or the one before its final Softmax or Sigmoid. Found by
            `resolve`.
    """

    loss: Loss | None
    output: str | None = None
    weight: float | Schedule = 1.0
    target: str | None = None
    reads: str | None = None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the weight, if it has one."""
        return self.weight if isinstance(self.weight, Schedule) else None

    @property
    def has_target(self) -> bool:
        """Whether the loss compares with labels."""
        return self.loss is not None and getattr(self.loss, "has_target", True)

    @property
    def also(self) -> Sequence[str]:
        """Names of the values that the loss takes besides the output."""
        return () if self.loss is None else self.loss.also

    def targets(self, y: ir.Value) -> dict[str, Spec]:
        """The labels of the loss of a value, by name, then the weights of the samples; none without a loss.

        Args:
            y: The value that the loss reads.
        """
        if self.loss is None:
            return {}
        found: dict[str, Spec] = {}
        if self.has_target:
            name = self.target or "target"
            found[name] = self.loss.target(y)
            found |= {f"{name}_{key}": spec for key, spec in self.loss.more_targets(y).items()}
        if self.loss.sample_weight:
            (_, shape), *_ = *found.values(), (None, y.shape)
            found[SAMPLE_WEIGHT] = ir.DataType.FLOAT, ir.Shape([shape[0] if shape else None])
        return found

    def to_json(self) -> dict[str, Any]:
        """The term as JSON values, with the options of its loss."""
        name = None if self.loss is None else type(self.loss).__name__
        options = {} if self.loss is None else self.loss.to_json()
        return {
            "loss": name,
            "output": self.output,
            "reads": self.reads or self.output,
            "weight": self.weight if self.schedule is None else float(self.schedule(0)),
            "target": self.target,
            "options": options,
            **({} if self.schedule is None else {"schedule": self.schedule.to_json()}),
        }


OneLoss: TypeAlias = str | Loss | type[Loss] | Callable[..., ir.Value] | Term
Entry: TypeAlias = OneLoss | tuple[SupportsFloat | Schedule, OneLoss]
LossLike: TypeAlias = OneLoss | Mapping[str, Entry | SupportsFloat | Schedule] | Sequence[Entry]
"""One loss, or several: `{output: loss, or (weight, loss), or the weight of a scalar output}`, or a list."""


def resolve(graph: ir.Graph, loss: LossLike, outputs: Sequence[str] | None = None) -> tuple[Term, ...]:
    """Resolve `loss` for a graph; a loss that names no output is of the only floating one in `outputs`.

    Labels get names that no value of the graph has.

    Raises:
        ArgumentError: A name is unknown, the output is ambiguous, or a loss has the wrong type.
    """
    if isinstance(loss, Mapping):
        terms = [_term(graph, entry, output) for output, entry in loss.items()]
    elif isinstance(loss, Sequence) and not isinstance(loss, str):
        terms = [_term(graph, entry, None) for entry in loss]
    else:
        terms = [_term(graph, loss, None)]
    if not terms:
        raise ArgumentError("The argument loss is empty.", hint=_HINT)
    terms = [_placed(graph, t, outputs) for t in terms]
    several = sum(t.has_target for t in terms) > 1
    names = [t.target or (f"{t.output}_target" if several else "target") for t in terms]
    used = Namespace.of_values(graph)
    free = {name: used.claim(name) for name in dict.fromkeys(names)}
    return tuple(replace(t, target=free[name]) if t.has_target else t for t, name in zip(terms, names, strict=True))


def _term(graph: ir.Graph, entry: Entry | SupportsFloat | Schedule, output: str | None) -> Term:
    """Resolve one entry."""
    weight: float | Schedule = 1.0
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], (SupportsFloat, Schedule)):
        weight, entry = _weight(entry[0]), entry[1]
    if isinstance(entry, Term):
        return replace(entry, output=entry.output or output, weight=_product(_weight(entry.weight), weight))
    if isinstance(entry, str):
        values = named_values(graph)
        is_value = entry in values and (entry not in LOSSES or values[entry].is_graph_output())
        if is_value and output in (None, entry):
            return Term(None, entry, weight)
        if entry not in LOSSES:
            candidates = [v.name or "" for v in graph.outputs if floating(v)]
            check_names([entry], [*LOSSES, *(candidates if output is None else [])], "loss")
        return Term(LOSSES[entry](), output, weight)
    if isinstance(entry, (SupportsFloat, Schedule)) and output is not None:
        return Term(None, output, _weight(entry))
    if isinstance(entry, type) and issubclass(entry, Loss):
        entry = entry()
    if isinstance(entry, Loss):
        return Term(entry, output, weight)
    if callable(entry) and not isinstance(entry, (type, Schedule)):
        return Term(Custom(entry), output, weight)
    raise ArgumentError(f"A loss is a name, a member of onnx_convgrad.losses or a function, not {entry!r}.", hint=_HINT)


def _ports(graph: ir.Graph) -> list[str]:
    return [v.name or "" for v in (*graph.outputs, *graph.inputs)]


def _weight(weight: SupportsFloat | Schedule) -> float | Schedule:
    """A weight, if its first number is finite."""
    first = float(weight(0) if isinstance(weight, Schedule) else weight)
    if not math.isfinite(first):
        raise ArgumentError(f"The weight of a loss must be finite, not {weight!r}.")
    return weight if isinstance(weight, Schedule) else first


def _product(own: float | Schedule, outer: float | Schedule) -> float | Schedule:
    """The weight of a term that has one, in a list that gives it another."""
    if isinstance(own, Schedule) or isinstance(outer, Schedule):
        if 1 not in (own, outer):
            raise ArgumentError(
                f"The weight of a loss follows a schedule, and is multiplied by another: {own!r} and {outer!r}.",
                hint="Give one weight, with the product in the schedule.",
            )
        return own if outer == 1 else outer
    return own * outer


def _placed(graph: ir.Graph, term: Term, outputs: Sequence[str] | None) -> Term:
    """Determine the output of a term and check it."""
    values = named_values(graph)
    if isinstance(term.loss, Custom) and term.loss.reads:
        check_names([name for name in term.loss.reads if name not in values], _ports(graph), "value in reads:", INSPECT)
        if term.output not in (None, term.loss.reads[0]):
            raise ArgumentError(
                f"The loss of {term.output!r} reads {term.loss.reads[0]!r} first.",
                hint="Give the loss by itself or in a list, without the name of an output.",
            )
        term = replace(term, output=term.loss.reads[0])
    if term.output is None:
        options = [v.name or "" for v in dict.fromkeys(graph.outputs) if floating(v)]
        chosen = [name for name in options if outputs is None or name in outputs]
        if len(chosen) != 1:
            raise ArgumentError(
                f"The model has {len(chosen)} floating outputs ({', '.join(chosen)}); the loss does not name one.",
                hint="Give loss={output: loss}, with one or several entries; on the command line --loss OUTPUT=NAME.",
            )
        term = replace(term, output=chosen[0])
    assert term.output is not None
    if term.output not in values:
        check_names([term.output], [v.name or "" for v in graph.outputs], "output in loss:", INSPECT)
    value = values[term.output]
    if not floating(value):
        raise ArgumentError(
            f"The loss is of {term.output!r}, which has dtype {value.dtype and value.dtype.name}, not a floating one.",
            hint="Name a floating output: loss={output: ...}, --loss OUTPUT=NAME.",
        )
    if term.loss is None and value.shape is not None and any(known(d) not in (1, None) for d in value.shape):
        raise ArgumentError(f"The loss {term.output!r} has shape {value.shape}; it must be one number.", hint=_HINT)
    return term if term.loss is None else replace(term, reads=value_read(value, term.loss, _name(term.loss)).name)


def _name(loss: Loss) -> str:
    return next((name for name, kind in LOSSES.items() if type(loss) is kind), type(loss).__name__)


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
