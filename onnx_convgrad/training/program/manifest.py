"""What each input and output of a training program is, as JSON.

The manifest is written beside the graphs as `manifest.json`, and into each graph as
`metadata_props["onnx_convgrad.training"]`, so that a single file is enough too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import onnx_ir as ir

from onnx_convgrad.errors import ModelError

__all__ = ["FORMAT", "VERSION", "Manifest", "Parameter", "Port", "State"]

FORMAT = "onnx_convgrad.training_program"

VERSION = 1
"""Raised when a reader of the old form would misread the new one."""


@dataclass(frozen=True, slots=True)
class Port:
    """A graph input or output: name, dtype (as numpy calls it), sizes (`None` where unknown; a name where symbolic)."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ir.Value, name: str | None = None) -> Port:
        """The port of a value."""
        dtype = (value.dtype or ir.DataType.FLOAT).numpy().name
        dims = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)
        return cls(name or value.name or "", dtype, dims)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained value: the input `name`, its gradient (of `gradients` and `update`) and the output with its update."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    gradient: str
    next: str


@dataclass(frozen=True, slots=True)
class State:
    """A value that goes from step to step besides the parameters.

    Attributes:
        kind: `"optimizer"` (moves with `update`), `"statistic"` (running mean or variance of a BatchNormalization) or
            `"random"` (seed of what is drawn); the latter two move with the forward pass.
        of: The parameter that it belongs to, if any.
        slot: What it is to the optimizer, for example `exp_avg`; names are PyTorch's.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    next: str
    kind: str
    of: str | None = None
    slot: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The roles of all names of a training program. Every parameter, state and the learning rate has a default.

    Attributes:
        data: Inputs of the model.
        targets: Inputs that the losses compare with.
        learning_rate: Input, a scalar.
        loss: Output, the sum of all terms.
        terms: Outputs with each term, where there are several.
        outputs: Outputs of the model.
        optimizer: Name and options.
        losses: Name, output and options of each term.
        options: What else the program was built with.
    """

    data: tuple[Port, ...]
    targets: tuple[Port, ...]
    learning_rate: Port
    loss: str
    terms: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    state: tuple[State, ...]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def moving(self) -> tuple[Parameter | State, ...]:
        """What changes from step to step: parameters, then state."""
        return (*self.parameters, *self.state)

    def stored(self) -> tuple[Parameter | State, ...]:
        """What a trained model is made of: parameters and running statistics."""
        return (*self.parameters, *(s for s in self.state if s.kind == "statistic"))

    def inputs(self) -> list[str]:
        """Names of the inputs of all graphs, in their order."""
        first = [port.name for port in (*self.data, *self.targets, self.learning_rate)]
        return [
            *first,
            *(p.name for p in self.parameters),
            *(p.gradient for p in self.parameters),
            *(m.name for m in self.moving()),
        ]

    def to_json(self) -> str:
        """The manifest as JSON text."""
        plain = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(plain, indent=1, default=lambda option: option.tolist())  # of numpy or PyTorch

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The manifest from JSON text.

        Raises:
            ModelError: It is not a manifest, or one of a later version.
        """
        try:
            found = json.loads(text)
            if found.pop("format") != FORMAT:
                raise ModelError("The manifest is of something else.")
            version = found.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise ModelError(f"This is no manifest of a training program ({problem}).") from problem
        if version != VERSION:
            raise ModelError(f"The manifest has version {version}; this release reads version {VERSION}.")
        try:
            return cls(**{f.name: _field(f.name, found[f.name]) for f in fields(cls)})
        except (KeyError, TypeError) as problem:
            raise ModelError(f"The manifest is incomplete ({problem}).") from problem


_ENTRIES: dict[str, Any] = {"data": Port, "targets": Port, "parameters": Parameter, "state": State}


def _field(name: str, value: Any) -> Any:
    """A JSON value as the field `name` holds it."""
    if name in _ENTRIES:
        return tuple(_ENTRIES[name](**_sized(entry)) for entry in value)
    if name == "learning_rate":
        return Port(**_sized(value))
    return tuple(value) if isinstance(value, list) else value


def _sized(entry: dict[str, Any]) -> dict[str, Any]:
    shape = entry.get("shape")
    return {**entry, "shape": None if shape is None else tuple(shape)}
