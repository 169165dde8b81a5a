"""A loaded model: read, checked and canonical, with the roles of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx_ir as ir

from onnx_convgrad.base.limits import Limits
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.bound_inputs import InputValues
from onnx_convgrad.frontend.metadata import states_of
from onnx_convgrad.frontend.roles import Role, parameters, roles_of
from onnx_convgrad.frontend.shapes.declared import InputShapes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model that was read, checked and brought to canonical form once, for any number of transformations.

    `onnx_convgrad.load` makes it, and every function of this package that takes a model takes it, too. Nothing changes it;
    what is made of it shares its weights. Results have the kind of what `load` was given: a path gives an
    `onnx.ModelProto`. A copy is the model itself; a pickle holds its weights, and loads it again.

    Args:
        source: The model as its file has it. Only to read.
        canonical: The model at the canonical opset, with constants as initializers, inferred shapes, and an initializer for
            each parameter that the exporter merged. Only to read.
        kind: The kind of results: `onnx.ModelProto` or `onnx_ir.Model`.
        input_shapes: As given to `load`.
        input_values: As given to `load`, each input by its name; `canonical` has no such inputs.
        limits: As given to `load`; they hold for what is made of the model, too.
    """

    source: ir.Model
    canonical: ir.Model
    kind: type = field(default=ir.Model, kw_only=True)
    input_shapes: InputShapes | None = field(default=None, kw_only=True)
    input_values: InputValues | None = field(default=None, kw_only=True)
    limits: Limits | None = field(default=None, kw_only=True)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(v.name or "" for v in self.canonical.graph.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(v.name or "" for v in self.canonical.graph.outputs)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the stored values that are trained by default, in the order of their first use."""
        return tuple(v.name or "" for v in parameters(self.canonical.graph))

    @property
    def roles(self) -> Mapping[str, Role]:
        """Each input and stored value by name: its `kind` (such as `"parameter"` or `"constant"`) and the `reason`."""
        return MappingProxyType(dict(roles_of(self.canonical.graph)))

    @property
    def states(self) -> dict[str, str]:
        """Input -> output whose value it takes in the next call: those given to `load`, or those of the file."""
        return states_of(self.canonical)

    @property
    def opset(self) -> int:
        """Version of the operators of ONNX in the file."""
        imports = self.source.opset_imports
        return imports.get("", imports.get("ai.onnx", 1))

    def __copy__(self) -> Model:
        return self  # nothing changes it

    def __deepcopy__(self, memo: dict[int, object]) -> Model:
        return self

    def __repr__(self) -> str:
        graph = self.canonical.graph
        stored = [v.const_value.size for v in parameters(graph) if v.const_value is not None]
        ports = (", ".join(map(_port, values)) or "none" for values in (graph.inputs, graph.outputs))
        return (
            f"<Model {graph.name!r}: inputs {next(ports)}; outputs {next(ports)};"
            f" {len(stored)} parameters of {sum(stored):,} numbers; opset {self.opset}>"
        )


def _port(value: ir.Value) -> str:
    """Name, type and shape of an input or output: `x float32[N, 3]`."""
    dtype = "?" if value.dtype is None else value.dtype.numpy()
    sizes = None if value.shape is None else [str(d if isinstance(d, int) else d.value or "?") for d in value.shape]
    return f"{value.name} {dtype}[{'...' if sizes is None else ', '.join(sizes)}]"


def refuse_settings(**given: object) -> None:
    """Raise `ArgumentError` if any argument of `load` is given, together with a model that is loaded."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ArgumentError(
            f"The model is loaded already, and {' and '.join(names)} can only be given when it is loaded.",
            hint=f"Give them to onnx_convgrad.load: model = load(path, {names[0]}=...).",
        )


def check_settings(input_shapes: object, input_values: object, limits: object) -> None:
    """Raise `ArgumentError` for arguments of `load` that are wrong for any model."""
    for name, what, mapping in (("input_shapes", "sizes", input_shapes), ("input_values", "values", input_values)):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise ArgumentError(f"{name} must map names of inputs to their {what}, not {mapping!r:.60}.")
    if isinstance(input_values, Mapping) and isinstance(input_shapes, Mapping):
        for name in filter(input_values.__contains__, input_shapes):
            raise ArgumentError(f"The input {name!r} is in input_values and in input_shapes.", hint="Leave out one.")
    if limits is not None and not isinstance(limits, Limits):
        raise ArgumentError(f"limits must be an onnx_convgrad.Limits, not {limits!r}.")
