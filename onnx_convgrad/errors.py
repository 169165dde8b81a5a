"""Define the tree of errors that the package raises.

::

    ConvGradError
    ├── ArgumentError            an argument is wrong (unknown value, bad option)        exit status 2
    ├── ModelError               the model cannot be used (unreadable, unknown rank)     exit status 2
    │   └── LimitError           it asks for more work or memory than `Limits` allow     exit status 2
    ├── DifferentiationError     some nodes cannot be differentiated; lists all of them  exit status 3
    ├── LoweringError            no lowering of a gradient operator applies              exit status 3
    ├── UnsupportedCase          a rule does not cover the attributes or operands        exit status 3
    │   └── UnknownShape         a rule needs a rank or a dimension that is unknown      exit status 3
    ├── RuleContractError        a rule broke its contract; addressed to its author      exit status 3
    ├── ExecutionError           ONNX Runtime is missing, or refused or failed a model   exit status 2
    ├── CheckpointError          a checkpoint is unreadable, foreign or not writable     exit status 2
    ├── DivergenceError          training has left the finite numbers, or never updates  exit status 3
    └── InternalError            a fault of this package; please report it               exit status 3

Rules raise `UnsupportedCase` and `UnknownShape`; the walk adds the nodes and raises one `DifferentiationError` for all of
a model's problems.
"""

from __future__ import annotations

import copyreg
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConvGradError",
    "DifferentiationError",
    "DivergenceError",
    "ExecutionError",
    "InternalError",
    "LimitError",
    "LoweringError",
    "ModelError",
    "Problem",
    "RuleContractError",
    "UnknownShape",
    "UnsupportedCase",
]


def shown(text: str) -> str:
    r"""The text on one line of a terminal, with escapes (`\x1b`, `\n`, `\u202e`) for all that is not to be read.

    Such are control characters, which command a terminal, line ends, which could forge a line of ours, marks that change the
    direction of the text around them, and characters that Unicode leaves private or unassigned.

    >>> print(shown("größe \x1b[2J\nError"))
    größe \x1b[2J\nError
    """
    if text.isprintable():
        return text
    kept = (c.isprintable() or unicodedata.category(c) == "Zs" for c in text)
    return "".join(c if keep else c.encode("unicode_escape").decode() for c, keep in zip(text, kept, strict=True))


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first names, at most so many, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class ConvGradError(Exception):
    """Base of every error of this package; `hint` is the remedy, and `lines` are items below both.

    Each of them is one line: names in a model cannot command the terminal that the error is printed on.
    """

    exit_status = 2

    def __init__(self, message: str, *, hint: str = "", lines: Sequence[str] = ()) -> None:
        self.message = shown(message)
        self.hint = shown(hint)
        items = [f"  - {shown(line)}" for line in lines]
        super().__init__("\n".join([f"{self.message} {self.hint}".strip(), *items]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors picklable: rebuild them without `__init__`, whose parameters differ."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ArgumentError(ConvGradError, ValueError):
    """An argument has a wrong type or value, or does not fit the model."""


class ModelError(ConvGradError):
    """The model cannot be read, is invalid, or lacks something that every transformation needs."""


class LimitError(ModelError):
    """The model asks for more work or memory than the limits allow; see `onnx_convgrad.Limits`."""


class LoweringError(ConvGradError):
    """No lowering of an abstract gradient operator applies; the message gives each candidate's reason."""

    exit_status = 3


class RuleContractError(ConvGradError):
    """A rule returned something that its declaration does not allow. Addressed to the author of the rule.

    `suspect` says what is wrong with the model instead, if the rule is right, as those of this package should be.
    """

    exit_status = 3

    def __init__(self, message: str, *, hint: str = "", suspect: str = "") -> None:
        self.suspect = suspect
        super().__init__(message, hint=hint)


class ExecutionError(ConvGradError):
    """ONNX Runtime is not installed, lacks the provider, or refused or failed the model.

    `snippet` may hold a program that reproduces the failure with numpy and ONNX Runtime alone; it is printed, too.
    """

    def __init__(self, message: str, *, hint: str = "", snippet: str = "") -> None:
        self.snippet = snippet
        super().__init__(message, hint=hint)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.snippet}" if self.snippet else super().__str__()


class CheckpointError(ConvGradError):
    """A checkpoint is damaged, belongs to another program, or cannot be written."""


class DivergenceError(ConvGradError):
    """Training cannot go on: a loss or a parameter is not finite, or no step of float16 training updates anything."""

    exit_status = 3


class InternalError(ConvGradError):
    """An error that this package did not foresee; `__cause__` is the original one."""

    exit_status = 3

    def __init__(self, message: str, *, hint: str = "Please report it, with the model if you can share it.") -> None:
        super().__init__(message, hint=hint)


class UnsupportedCase(ConvGradError):  # noqa: N818 - a signal from a rule to the walk
    """A rule exists, but not for this combination of attributes; the message is the reason."""

    exit_status = 3


class UnknownShape(UnsupportedCase):
    """A rule needs a rank or a dimension that shape inference did not find."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One node through which a wanted gradient cannot pass.

    Attributes:
        node: Name of the node.
        op_type: Its operator.
        opset: Version of the operator's opset.
        reason: Why the gradient cannot pass.
        path: The values between the node and the target.
        hint: The remedy.
    """

    node: str
    op_type: str
    opset: int
    reason: str
    path: tuple[str, ...]
    hint: str

    def __str__(self) -> str:
        route = " <- ".join(self.path) if len(self.path) <= 7 else " <- ".join((*self.path[:3], "...", *self.path[-3:]))
        text = f"{self.node} ({self.op_type}, opset {self.opset}): {self.reason} Path: {route}. {self.hint}"
        return shown(text.strip())


class DifferentiationError(ConvGradError):
    """Some gradients cannot be built. `problems` holds every blocking node, not just the first."""

    exit_status = 3

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} node{'s' * (count != 1)} cannot be differentiated:"
        super().__init__(head, lines=[f"{problem}" for problem in self.problems])


def require(condition: bool, reason: str, hint: str = "") -> None:
    """Raise `UnsupportedCase` inside a rule unless `condition` holds; the walk adds the node."""
    if not condition:
        raise UnsupportedCase(reason, hint=hint)
