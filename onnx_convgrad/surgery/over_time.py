"""Run a model that takes one frame in a call over many frames, by a Scan that carries its states."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.base.names import INSPECT, as_names, check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.metadata import states_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Carried, Layout, Slices, emit_loop
from onnx_convgrad.ir.namespace import Namespace, rename
from onnx_convgrad.ir.passes import RemoveUnused


@transformation
def over_time(model: AnyModel, *, axis: int = 1, constant: Sequence[str] | str = ()) -> ir.Model:
    """Let a model that takes one frame in a call take many: inputs and outputs get an axis of time, and states are carried.

    States are those of `onnx_convgrad.load(path, states=...)`: the result begins with them, and returns those behind the
    last frame. Gradients pass from frame to frame. Weights keep their names, so that the model itself takes what was
    trained: `Trainer(program).load(trainer)`.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        axis: Axis of time in inputs and outputs.
        constant: Inputs that all frames share, besides those without axes.

    Returns:
        The model at opset 21. A Scan runs what depends on frames and states.

    Raises:
        ArgumentError: An input is unknown or a state, or no input has frames.
        ModelError: The model cannot be read, an input is an output, too, or one of them has too few axes, or an unknown
            number.
    """
    changed, axis = cloned(load(model).canonical), whole(axis, "axis", 0)
    graph, states = changed.graph, states_of(changed)
    inputs, outputs = ({v.name or "": v for v in values} for values in (graph.inputs, graph.outputs))
    shared = as_names(constant, "constant")
    check_names(shared, [name for name in inputs if name not in states], "input in constant:", INSPECT)
    frames = [name for name, v in inputs.items() if name not in (*states, *shared) and (v.shape is None or v.shape)]
    if not frames:
        raise ArgumentError("No input has frames.", hint="Leave inputs that have some out of constant.")
    made = [name for name in outputs if name not in states.values()]
    for value in (*(inputs[name] for name in frames), *(outputs[name] for name in made)):
        _check_rank(value, axis)
    if both := [name for name in inputs if name in outputs]:
        raise ModelError(
            f"{both[0]!r} is an input and an output, and over time it would be two values.",
            hint="Remove the output, or let an Identity compute it under another name.",
        )
    e = Emitter(graph)
    e.emitted.extend(graph)
    names, length = Namespace.of_values(graph), ir.SymbolicDim(_free_name(graph))
    for name, value in {**outputs, **{name: inputs[name] for name in (*states, *frames)}}.items():
        rename(value, names.claim(f"{name}_of_frame"))
    e.names.used.update(names.used)
    new = {name: _outer(inputs[name], name, None) for name in states}
    new |= {name: _outer(inputs[name], name, (axis, length)) for name in frames}
    order = [new.get(name, value) for name, value in inputs.items()]
    graph.inputs.clear()
    graph.inputs.extend(order)
    graph.outputs.clear()
    finals, joined = emit_loop(
        e,
        0,
        [Carried(new[name], inputs[name], outputs[output]) for name, output in states.items()],
        {inputs[name]: Slices(new[name], Layout(axis)) for name in frames},
        [(outputs[name], Layout(axis)) for name in made],
    )
    results = {**dict(zip(states.values(), finals, strict=True)), **dict(zip(made, joined, strict=True))}
    for name in outputs:
        results[name].name = name
    graph.outputs.extend(results[name] for name in outputs)
    RemoveUnused()(changed)
    return changed


def _check_rank(value: ir.Value, axis: int) -> None:
    """Raise `ModelError` if a value has too few axes for one of time, or an unknown number."""
    if value.shape is None or len(value.shape) < axis:
        known = "an unknown number of" if value.shape is None else str(len(value.shape))
        raise ModelError(
            f"{value.name!r} has {known} axes, and an axis of time shall be axis {axis} of it.",
            hint="Give another axis; or its shape, with onnx_convgrad.load(path, input_shapes=...).",
        )


def _outer(value: ir.Value, name: str, inserted: tuple[int, ir.SymbolicDim] | None) -> ir.Value:
    """An input of the main graph in place of one of a frame, perhaps with an axis of time."""
    sizes = list(value.shape or ())
    if inserted is not None:
        sizes.insert(*inserted)
    shape = None if value.shape is None else ir.Shape(sizes)
    return ir.Value(name=name, shape=shape, type=value.type)


def _free_name(graph: ir.Graph) -> str:
    """A name for the number of frames that no size of the inputs has."""
    taken = {dim.value for v in graph.inputs for dim in v.shape or () if isinstance(dim, ir.SymbolicDim)}
    return next(name for name in ("T", "frames", *(f"frames_{i}" for i in range(len(taken)))) if name not in taken)
