"""The options of every transformation: validated once, with the command-line option of each.

Imports nothing slow, so that `--help` answers at once; validation imports what it needs.
"""

# ruff: noqa: RUF009 - `option` makes a field

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from onnx_convgrad.base.limits import Limits
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.command_options import CommandOption, option

if TYPE_CHECKING:
    from onnx_convgrad.frontend.bound_inputs import InputValues
    from onnx_convgrad.frontend.files import AnyModel
    from onnx_convgrad.frontend.model import Model
    from onnx_convgrad.frontend.shapes.declared import InputShapes
    from onnx_convgrad.lowering.candidates import Choosing
    from onnx_convgrad.memory.budget import MemoryBudget

Names = str | Sequence[str]

Wrt = Names | Mapping[str, slice]
"""Names of values; or name, glob or group -> output channels, see `frontend.parts`."""

COMPOSITIONS = ("forward_over_reverse", "reverse_over_reverse", "reverse_over_forward")
"""Ways to compute H v; the first is the default: the derivative of the gradient along v, the gradient of
<gradient, v>, and the gradient of the derivative along v."""


_AUGMENT = "api:augment"
_LOAD = "frontend.load:load"
_TARGET = "pipeline.options:Target"
_MEMORY = "pipeline.options:Memory"


_LOWERINGS = (
    "OP=NAME forces one (`explain` lists them); also exact, fast, or a file that `bench` saved. Repeatable. "
    "[default: auto]"
)
_SHAPE = "Sizes are numbers, symbols or ?. Repeatable."
_VALUE = "A number, true, false, numbers separated by commas, or @FILE.npy. Repeatable."
_LIMIT = "These are nodes, constant_bytes and depth. Repeatable."
_RANGE = "Repeated or separated by commas; NAME=0:16 means these output channels."


@dataclass(frozen=True, slots=True)
class Target:
    """The execution provider that a graph is emitted for, and how its gradients are lowered.

    Args:
        name: Execution provider to emit for: `"cpu"`, `"cuda"`, `"web"`, `"webgpu"`, `"arm"` or `"portable"`.
        deterministic: Emit no sum whose order differs from run to run on a GPU. Gradients of max-pools are added up window
            by window. Sums at indices known only at run time remain, and a warning names them. On the CPU all sums are
            ordered. Sessions have an option of the same name.
        lowering: Lowerings of the gradients of convolutions and pools. `"auto"` (the fastest predicted for the target, with
            gradients about as precise as PyTorch's), `"exact"` (only lowerings that round no more than a direct sum, so not
            Winograd's), `"fast"` (the fastest, whatever they round), or a mapping from gradient operator (or node name) to
            the name of a lowering.
        max_workspace: Most bytes that the lowering of one gradient may use besides its operands and result. Larger
            batches are cut into chunks; lowerings that still exceed the limit are not used.

    Raises:
        ArgumentError: An unknown target, an unknown lowering, or a workspace that is not a positive number.
    """

    name: str = option("--target NAME", of=_TARGET, default="cpu")
    _: KW_ONLY
    deterministic: bool = option(of=_TARGET, default=False)
    lowering: Choosing = option("OP=NAME...", of=_TARGET, text=_LOWERINGS, parse=text.lowering, default="auto")
    max_workspace: int | None = option("SIZE", of=_TARGET, text="For example 256MB.", parse=text.size_in_bytes)

    def __post_init__(self) -> None:
        from onnx_convgrad.base.numbers import flag
        from onnx_convgrad.ir.targets import target_named
        from onnx_convgrad.lowering.lower import check_choice, check_workspace

        target_named(self.name)
        flag(self.deterministic, "deterministic")
        check_choice(self.lowering)
        check_workspace(self.max_workspace)
        if isinstance(self.lowering, Mapping):  # a value of its own, which later changes of the caller's do not reach
            object.__setattr__(self, "lowering", dict(self.lowering))

    def __hash__(self) -> int:
        lowering = self.lowering if isinstance(self.lowering, str) else frozenset(self.lowering.items())
        return hash((self.name, self.deterministic, lowering, self.max_workspace))

    @classmethod
    def of(cls, given: TargetLike) -> Target:
        """A target as it is, or one with defaults.

        Args:
            given: A target, or its name.
        """
        return given if isinstance(given, Target) else cls(given)


TargetLike = Target | str
"""A target, or its name."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Ways to save memory: a budget, recomputation, and a narrow type for what waits for the gradients.

    Args:
        budget: Most memory of a run: bytes, a share such as `0.5` of the memory without a budget, or `"min"`. Bytes need
            known sizes of the inputs. Lowerings, recomputation and the order of the nodes are chosen together, in the least
            predicted time. The memory is that of results, inputs and weights in ONNX Runtime's CPU provider, predicted by a
            model of its allocator; the runtime itself takes some more. It excludes `recompute`.
        recompute: Forward values to compute again for the gradients instead of keeping them: names and globs, or `"auto"`.
            The latter frees the most memory for at most 15 % more predicted time. Random values (Dropout) are always kept.
            Results are bit-equal, unless the runtime fuses the nodes of a copied value differently. `explain` shows what it
            saves and costs.
        activations: Type in which large forward values are kept for the gradients: `"float16"` or `"bfloat16"`. They take
            half the memory then. Outputs keep their bits; gradients are rounded, by about 1e-3 and 1e-2 of their norms.
            Values beyond 65504 become infinite in float16, not in bfloat16.

    Raises:
        ArgumentError: A value is not one of those allowed, or both a budget and `recompute` are given.
    """

    budget: MemoryBudget | None = option("--memory-budget SIZE", of=_MEMORY, parse=text.memory_budget)
    _: KW_ONLY
    recompute: Names | None = option("NAMES...", of=_MEMORY, parse=text.recompute)
    activations: str | None = option("--activation-precision TYPE", of=_MEMORY)

    def __post_init__(self) -> None:
        from onnx_convgrad.base.names import as_names
        from onnx_convgrad.memory.activation_precision import check_activations
        from onnx_convgrad.memory.budget import check_budget

        if self.recompute is not None:
            names = as_names(self.recompute, "recompute")
            object.__setattr__(self, "recompute", self.recompute if isinstance(self.recompute, str) else tuple(names))
        check_activations(self.activations)
        check_budget(self.budget)
        if self.budget is not None and self.recompute is not None:
            raise ArgumentError("A memory budget chooses what is recomputed: leave out recompute.")

    @classmethod
    def of(cls, given: MemoryLike) -> Memory:
        """Settings as they are, or those of a budget alone.

        Args:
            given: Settings, a budget, or `None` for no saving.
        """
        return given if isinstance(given, Memory) else cls(given)


MemoryLike = Memory | int | float | str | None
"""Settings, or a budget alone; `None` saves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Arguments of `onnx_convgrad.load` on the command line."""

    input_shapes: InputShapes | None = option(
        "--input-shape NAME:1,3,H,W...", of=_LOAD, text=_SHAPE, parse=text.input_shapes
    )
    input_values: InputValues | None = option(
        "--input-value NAME=VALUE...", of=_LOAD, text=_VALUE, parse=text.input_values
    )
    limits: Limits | None = option("--limit NAME=N...", of=_LOAD, text=_LIMIT, parse=text.limits)

    def load(self, model: AnyModel) -> Model:
        """Load a model with these arguments."""
        from onnx_convgrad.frontend.load import load

        return load(model, input_shapes=self.input_shapes, input_values=self.input_values, limits=self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the transformations; `onnx_convgrad.augment` documents each.

    Raises:
        ArgumentError: A value is not one of those allowed.
    """

    wrt: Wrt = option("NAMES...", of=_AUGMENT, text=_RANGE, parse=text.wrt, default="parameters")
    of: Names | None = option(of=_AUGMENT, parse=text.names)
    cotangents: str | None = option("ones", of=_AUGMENT)
    training: bool = option(of=_AUGMENT, default=False)
    per_sample: bool | str = option(
        "--per-sample",
        of=_AUGMENT,
        more=(CommandOption("--squared-norm", "The squared norm of each sample's gradient; implies --per-sample."),),
        parse=text.per_sample,
        default=False,
    )
    trainable_inputs: bool = option(of=_AUGMENT, default=False)
    straight_through: bool = option(of=_AUGMENT, default=True)
    target: Target = field(default_factory=Target)
    memory: Memory = field(default_factory=Memory)
    outputs: bool = True  # whether the outputs of the model come before the derivatives, in vjp and jvp
    composition: str = COMPOSITIONS[0]
    compare: bool = False  # for reports: every lowering is priced, even where one is forced

    def __post_init__(self) -> None:
        from onnx_convgrad.base.names import check_names
        from onnx_convgrad.base.numbers import flag

        object.__setattr__(self, "target", Target.of(self.target))
        object.__setattr__(self, "memory", Memory.of(self.memory))
        if self.cotangents not in (None, "ones"):
            raise ArgumentError(f"cotangents must be None or 'ones', not {self.cotangents!r}.")
        check_names([self.composition], COMPOSITIONS, "composition")
        if self.per_sample not in (False, True, "squared_norm"):
            raise ArgumentError(f"per_sample must be False, True or 'squared_norm', not {self.per_sample!r}.")
        for name in ("training", "trainable_inputs", "straight_through"):
            flag(getattr(self, name), name)


PARTS = {"target": Target, "memory": Memory}
"""Fields of `Options` whose own fields are the options of the command line."""


def options_of(kind: type) -> Iterator[Field[Any]]:
    """The fields of a dataclass that have options on the command line, those of its parts among them."""
    for own in fields(kind):
        yield from options_of(PARTS[own.name]) if own.name in PARTS and kind is Options else (own,)


def field_of(name: str) -> Field[Any]:
    """The field of `Options`, of its parts or of `Loading`."""
    (own,) = (f for kind in (Options, Loading) for f in options_of(kind) if f.name == name)
    return own


def shared(name: str, *, default: Any = None) -> Any:
    """A dataclass field with the command-line options of another, found by `field_of`."""
    return field(default=default, metadata=field_of(name).metadata)
