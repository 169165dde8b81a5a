"""The options of every transformation: validated once, with the command-line option of each.

Imports nothing slow, so that `--help` answers at once; validation imports what it needs.
"""

# ruff: noqa: RUF009 - `option` makes a field

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from onnx_convgrad.base.limits import Limits
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import option_text as text

if TYPE_CHECKING:
    from onnx_convgrad.frontend.bound_inputs import InputValues
    from onnx_convgrad.frontend.shapes.declared import InputShapes
    from onnx_convgrad.lowering.candidates import Choosing
    from onnx_convgrad.memory.budget import MemoryBudget

Names = str | Sequence[str]

Wrt = Names | Mapping[str, slice]
"""Names of values; or name, glob or group -> output channels, see `frontend.parts`."""

COMPOSITIONS = ("forward_over_reverse", "reverse_over_reverse", "reverse_over_forward")
"""Ways to compute H v; the first is the default: the derivative of the gradient along v, the gradient of
<gradient, v>, and the gradient of the derivative along v."""


class LoweringSettings(TypedDict, total=False):
    """Keywords of everything that emits gradients; see `augment`."""

    target: str
    deterministic: bool
    lowering: Choosing
    max_workspace: int | None
    input_shapes: InputShapes | None
    input_values: InputValues | None
    limits: Limits | None
    base_dir: str | os.PathLike[str] | None


class Settings(LoweringSettings, total=False):
    """Keywords that all transformations share; see `augment`."""

    training: bool
    trainable_inputs: bool
    straight_through: bool
    recompute: Names | None
    activation_precision: str | None
    memory_budget: MemoryBudget | None


@dataclass(frozen=True, slots=True)
class CommandOption:
    """The form of an option on the command line.

    `usage` holds its names and the placeholder of its value: `-o --out FOLDER`, `--epochs INT`, `--lr NUMBER`, `--json` (no
    value), `--wrt NAMES...` (repeatable).
    """

    usage: str
    help: str

    @property
    def names(self) -> list[str]:
        """The option as it is typed."""
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value; `None` if there is none."""
        return next((word.removesuffix("...") for word in self.usage.split() if not word.startswith("-")), None)

    @property
    def kind(self) -> type:
        """Type of the value on the command line."""
        return list if self.usage.endswith("...") else _KINDS.get(self.metavar, str)

    @property
    def parameter(self) -> str:
        """The Python name: of `--input-shape` it is `input_shape`."""
        return self.names[-1].partition("/")[0].lstrip("-").replace("-", "_")


_KINDS: dict[str | None, type] = {None: bool, "INT": int, "NUMBER": float}


# Any: a dataclass field has the type of its annotation.
def option(*written: str, parse: Callable[..., Any] | None = None, default: Any = None) -> Any:
    """Make a dataclass field with command-line options.

    Args:
        written: Usage and help text of each option; see `CommandOption`. A default that is text or a number is added to the
            help text; others stand there in square brackets if they are not obvious.
        parse: From the values of the options to the value of the field.
        default: Of the field, if no option is given.
    """
    options = tuple(map(CommandOption, written[::2], written[1::2]))
    return field(default=default, metadata={"options": options, "parse": parse})


_WRT = (
    "Differentiate with respect to: parameters, inputs, all, or names and globs, repeated or separated by commas."
    " NAME=0:16 means these output channels."
)
_RECOMPUTE = "Forward values to compute again instead of keeping: auto, or names and globs, as for --wrt."
_KEPT = "Type in which forward values are kept for the gradients: float16 or bfloat16. [default: their own]"
_BUDGET = "Memory of a run: 2GB, 0.5 of that without a budget, or min. Chooses lowerings and recomputation."
_LOWERING = "Force a lowering (`explain` lists them), or exact, or fast, or a file that `bench` saved. Repeatable."
_WORKSPACE = "Most memory that one lowering may use, such as 256MB."
_LIMIT = "Raise a limit on what a file can ask for: nodes, constant_bytes or depth. Repeatable."
_SHAPE = "Shape of an input: numbers, symbols or ?. Repeatable."
_VALUE = "Bind an input to a constant: a number, true, false, numbers separated by commas, or @FILE.npy. Repeatable."
_ONES = "ones: the cotangent of every target is all ones, and no input is added for it."
_PER_SAMPLE = "One gradient per sample for each parameter, along a new first axis."
_NORM = "The squared norm of each sample's gradient; implies --per-sample."
_ORDERED = "Emit no sum whose order differs from run to run on a GPU."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the transformations; `onnx_convgrad.augment` documents each.

    Raises:
        ArgumentError: A value is not one of those allowed.
    """

    wrt: Wrt = option("--wrt NAMES...", _WRT, parse=text.wrt, default="parameters")
    of: Names | None = option(
        "--of NAMES...", "Values to differentiate. [default: every floating output]", parse=text.names
    )
    cotangents: str | None = option("--cotangents ones", _ONES)
    training: bool = option("--training", "Run BatchNormalization and Dropout in training mode.", default=False)
    per_sample: bool | str = option(
        "--per-sample", _PER_SAMPLE, "--squared-norm", _NORM, parse=text.per_sample, default=False
    )
    trainable_inputs: bool = option(
        "--trainable-inputs", "Make the differentiated weights graph inputs too.", default=False
    )
    straight_through: bool = option(
        "--straight-through/--no-straight-through",
        "Derivatives pass quantizers as if they did not round; without it they are zero.",
        default=True,
    )
    target: str = option("--target NAME", "cpu, cuda, web, webgpu, arm or portable.", default="cpu")
    deterministic: bool = option("--deterministic", _ORDERED, default=False)
    lowering: Choosing = option("--lowering OP=NAME...", _LOWERING, parse=text.lowering, default="auto")
    max_workspace: int | None = option("--max-workspace SIZE", _WORKSPACE, parse=text.size_in_bytes)
    recompute: Names | None = option("--recompute NAMES...", _RECOMPUTE, parse=text.recompute)
    activation_precision: str | None = option("--activation-precision TYPE", _KEPT)
    memory_budget: MemoryBudget | None = option("--memory-budget SIZE", _BUDGET, parse=text.memory_budget)
    input_shapes: InputShapes | None = option("--input-shape NAME:1,3,H,W...", _SHAPE, parse=text.input_shapes)
    input_values: InputValues | None = option("--input-value NAME=VALUE...", _VALUE, parse=text.input_values)
    limits: Limits | None = option("--limit NAME=N...", _LIMIT, parse=text.limits)
    base_dir: str | os.PathLike[str] | None = None
    composition: str = COMPOSITIONS[0]
    compare: bool = False  # for reports: every lowering is priced, even where one is forced

    def __post_init__(self) -> None:
        from onnx_convgrad.base.names import as_names, check_names
        from onnx_convgrad.base.numbers import flag
        from onnx_convgrad.ir.targets import target_named
        from onnx_convgrad.lowering.lower import check_choice, check_workspace
        from onnx_convgrad.memory.activation_precision import check_activation_precision
        from onnx_convgrad.memory.budget import check_budget

        if self.cotangents not in (None, "ones"):
            raise ArgumentError(f"cotangents must be None or 'ones', not {self.cotangents!r}.")
        check_names([self.composition], COMPOSITIONS, "composition")
        if self.per_sample not in (False, True, "squared_norm"):
            raise ArgumentError(f"per_sample must be False, True or 'squared_norm', not {self.per_sample!r}.")
        for name in ("training", "trainable_inputs", "straight_through", "deterministic"):
            flag(getattr(self, name), name)
        if isinstance(self.recompute, Mapping):
            raise ArgumentError(f"recompute takes a name or several, not {self.recompute!r}.")
        as_names(() if self.recompute is None else self.recompute, "recompute")
        target_named(self.target)
        check_choice(self.lowering)
        check_workspace(self.max_workspace)
        check_activation_precision(self.activation_precision)
        check_budget(self.memory_budget)
        if self.memory_budget is not None and self.recompute is not None:
            raise ArgumentError("memory_budget chooses what is recomputed: leave out recompute.")


def shared(name: str, *, default: Any = None) -> Any:
    """A dataclass field with the command-line options of a field of `Options`."""
    (own,) = (f for f in fields(Options) if f.name == name)
    return field(default=default, metadata=own.metadata)
