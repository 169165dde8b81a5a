"""The cost of a step of a training program: peak memory, floating-point operations, and both by layer.

Memory is that of results, inputs and stored constants in ONNX Runtime, see `memory.timeline`.

A Conv, ConvTranspose, MatMul or Gemm counts two operations for each multiplication; any other node that computes floating
numbers counts one for each number of its largest operand or result.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.roles import parameters
from onnx_convgrad.ir.nodes import ancestors, is_op
from onnx_convgrad.lowering.cost.passes import shape_of, value_bytes
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.program import TrainingProgram

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class LayerFootprint:
    """The cost of one node of the model, of `"loss"`, or of an `"update"` without a layer of its own.

    Attributes:
        layer: Name of the node.
        operator: Its operator.
        parameters: Bytes of the parameters that it is the first to read.
        state: Bytes of their optimizer state and of its running statistics.
        kept: Bytes of its results that the backward pass reads.
        forward: Operations of the forward pass.
        backward: Operations of the gradients and of the update of its parameters.
    """

    layer: str
    operator: str
    parameters: int = 0
    state: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """The cost of a step, in bytes and operations.

    Attributes:
        sizes: Shapes of data and labels that everything is counted for.
        typical: The sizes of axes that were not given and are not fixed.
        peak: Predicted bytes of a step: results, inputs and constants.
        inputs: Bytes of the inputs: data, labels, parameters, state.
        constants: Bytes of stored constants, such as parameters that are not trained.
        saved: Bytes of the gradients and the state of the optimizer of all parameters and channels that are not trained.
        narrowed: Bytes that float32 parameters would have more than those that are stored as integers.
        layers: By layer.
    """

    sizes: Mapping[str, tuple[int, ...]]
    typical: Mapping[str, int]
    peak: int
    inputs: int
    constants: int
    saved: int
    narrowed: int
    layers: tuple[LayerFootprint, ...]

    @property
    def flops(self) -> int:
        """Operations of a step."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The fields and `flops`, for JSON."""
        return {**asdict(self), "flops": self.flops}


def footprint(program: TrainingProgram, input_shapes: Mapping[str, Any] | None = None) -> Footprint:
    """Count what a step takes.

    Args:
        program: The program.
        input_shapes: Input of the data or the labels -> its sizes; others follow, or are typical (a batch of 8).

    Raises:
        ArgumentError: An unknown input, or a size that contradicts that of the program.
    """
    m, graph = program.manifest, program.model("step").graph
    given = _symbols(m, input_shapes or {})
    sizes = TypicalSizes(graph, given)
    nodes = [sizes.node(node) for node in graph]
    bytes_of: dict[str | None, int] = {}
    for node, old in zip(nodes, graph, strict=True):
        for new, value in zip(node.outputs, old.outputs, strict=True):
            new.type = value.type
            bytes_of[value.name] = value_bytes(new)
    dims = {v.name: list(v.shape) for v in graph.inputs if v.shape is not None}
    shapes = {p.name: dims.get(p.name, []) for p in (*m.data, *m.targets)}
    symbols = {d.value for own in shapes.values() for d in own if isinstance(d, ir.SymbolicDim)}
    inputs = {v.name or "": value_bytes(sizes.value(v)) for v in graph.inputs}
    constants = {
        v.name or "": v.const_value.nbytes
        for v in graph.initializers.values()
        if v.const_value is not None and v.name not in inputs
    }
    return Footprint(
        sizes={name: tuple(sizes.size(d) or 1 for d in own) for name, own in shapes.items()},
        typical={s: sizes.symbols[s] for s in sorted(filter(None, symbols)) if s not in given and s in sizes.symbols},
        peak=timeline(graph, sizes=sizes).peak,
        inputs=sum(inputs.values()),
        constants=sum(constants.values()),
        saved=_saved(program),
        narrowed=sum(4 * math.prod(p.static_shape()) - _stored_bytes(p) for p in m.parameters if "int" in p.dtype),
        layers=_layers(program, nodes, bytes_of),
    )


def _saved(program: TrainingProgram) -> int:
    """Bytes of the gradients and states that the parameters that are not trained would have."""
    m = program.manifest
    trained = {p.name for p in m.parameters}
    copies = 1 + max(Counter(s.of for s in m.state if s.of is not None).values(), default=0)
    known = parameters(load(program.model("inference")).canonical.graph)
    return copies * sum(v.const_value.nbytes for v in known if v.const_value is not None and v.name not in trained)


def _symbols(m: Manifest, input_shapes: Mapping[str, Any]) -> dict[str, int]:
    """The size of each symbol that the shapes give."""
    ports = {p.name: p for p in (*m.data, *m.targets)}
    found: dict[str, int] = {}
    for name, shape in input_shapes.items():
        if name not in ports:
            raise ArgumentError(
                f"The program has no input {name!r}.", hint=f"It has {first_few(list(map(repr, ports)))}."
            )
        declared = ports[name].shape
        for have, want in zip(declared or (), shape, strict=False):
            wrong = isinstance(have, int) and isinstance(want, int) and have != want
            if wrong or len(declared or ()) != len(shape) or found.get(str(have), want) != want:
                raise ArgumentError(
                    f"{name!r} has the shape {declared}, which {tuple(shape)} contradicts.",
                    hint="Give a shape with the sizes that are declared, or leave this input out of input_shapes.",
                )
            if isinstance(have, str) and isinstance(want, int):
                found[have] = want
    return found


def _layers(
    program: TrainingProgram, nodes: list[ir.Node], bytes_of: Mapping[str | None, int]
) -> tuple[LayerFootprint, ...]:
    """Attribute every node, parameter and kept value to the node of the model that it belongs to."""
    m, graph = program.manifest, program.model("step").graph
    operators = {n.name or "": n.op_type for n in program.model("inference").graph}
    counts: dict[str, dict[str, int]] = {name: defaultdict(int) for name in (*operators, "loss", "update")}
    readers = {v.name or "": [_owner(n.name, operators) for n in v.consumers()] for v in graph.inputs}
    home = {name: next((layer for layer in layers if layer in operators), "update") for name, layers in readers.items()}
    for p in m.parameters:
        counts[home.get(p.name, "update")]["parameters"] += _stored_bytes(p)
    for s in m.state:
        counts[home.get(s.of or s.name, "update")]["state"] += _stored_bytes(s)
    forward = _forward(m, graph)
    for node, old in zip(nodes, graph, strict=True):
        name = old.name or ""
        layer = _owner(name, operators)
        if layer not in counts:  # the update of a parameter: parameter/Optimizer/...
            layer = home.get(next((p.name for p in m.parameters if name.startswith(f"{p.name}/")), ""), "update")
            counts[layer]["backward"] += _flops(node)
            continue
        counts[layer]["forward" if old in forward else "backward"] += _flops(node)
        for value in old.outputs if old in forward and not is_view(old) else ():
            if _read_outside(value, forward):
                counts[layer]["kept"] += bytes_of[value.name]
    return tuple(LayerFootprint(name, operators.get(name, ""), **c) for name, c in counts.items() if any(c.values()))


def _forward(m: Manifest, graph: ir.Graph) -> set[ir.Node]:
    """The nodes that the loss, the outputs and the next statistics depend on."""
    made = {m.loss, *m.terms, *m.parts(), *m.outputs, *(s.next for s in m.state if s.kind != "optimizer")}
    return set[ir.Node]().union(*(ancestors(v) for v in graph.outputs if v.name in made))


def _read_outside(value: ir.Value, forward: set[ir.Node]) -> bool:
    """Whether a node outside `forward` reads a value, or a view of it."""
    return any(
        node not in forward or (is_view(node) and _read_outside(node.outputs[0], forward)) for node in value.consumers()
    )


def _owner(name: str | None, operators: Mapping[str, str]) -> str:
    """The node of the model that a node was added for, `"loss"`, or a name that is neither."""
    rest = name or ""
    while rest and rest not in operators:
        rest = rest.rpartition("/")[0]
    return rest or (name or "").partition("/")[0]


def _stored_bytes(port: Port) -> int:
    return math.prod(port.static_shape()) * np.dtype(port.dtype).itemsize


def _flops(node: ir.Node) -> int:
    """Operations of a node with known sizes; those of the body of a Scan count once for each slice."""
    y = shape_of(node.outputs[0]) if node.outputs else ()
    if is_op(node, "Conv"):
        w = shape_of(node.inputs[1])
        return 2 * math.prod(y) * math.prod(w[1:])
    if is_op(node, "ConvTranspose"):
        return 2 * math.prod(shape_of(node.inputs[0])) * math.prod(shape_of(node.inputs[1])[1:])
    if is_op(node, "MatMul", "Gemm"):
        x = shape_of(node.inputs[0])
        transposed = node.attributes.get_int("transA", 0) if node.op_type == "Gemm" else 0
        inner = (x[0] if transposed else x[-1]) if x else 1
        return 2 * math.prod(y) * inner
    if is_op(node, "Scan"):
        trips = shape_of(node.inputs[-1])[:1]
        return math.prod(trips) * sum(map(_flops, node.attributes["body"].as_graph()))
    if is_view(node) or (node.outputs and node.outputs[0].dtype not in _FLOATS):
        return 0
    return max(math.prod(shape_of(v)) for v in (*node.inputs, *node.outputs) if v is not None)
