"""A graph of a training program while it is put together: new inputs with defaults, outputs, names of new nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import complete
from onnx_convgrad.training.program.manifest import Manifest, Port

__all__ = ["Draft", "NodeNames", "empty"]


def empty(name: str) -> ir.Model:
    """A model without nodes."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name=name)
    return ir.Model(graph, ir_version=10)


class NodeNames:
    """Names for new nodes; ONNX Runtime refuses a graph where two nodes share one."""

    def __init__(self, graph: ir.Graph) -> None:
        self.taken = {node.name for node in graph}
        self._values = Namespace.of_values(graph)

    def value(self, like: ir.Value) -> str:
        """A free name for a value that gives its own away."""
        return self._values.claim(f"{like.name}_inner")

    def give(self, nodes: Iterable[ir.Node], prefix: str) -> None:
        """Name new nodes `<prefix>/<operator>`, with numbers from the second on."""
        counts: dict[str, int] = {}
        for node in nodes:
            stem = name = f"{prefix}/{node.op_type}"
            while name in self.taken:
                counts[stem] = counts.get(stem, 1) + 1
                name = f"{stem}_{counts[stem]}"
            self.taken.add(name)
            node.name = name


class Draft:
    """Owns a private copy of a canonical model; `seal` turns it into a finished one."""

    def __init__(self, base: ir.Model, target: Target) -> None:
        self.base, self.target = base, target
        self.m = base.clone()
        self.graph = self.m.graph
        self.values = named_values(self.graph)
        self.inputs: list[ir.Value] = list(self.graph.inputs)
        self.outputs: list[ir.Value] = []
        self.node_names = NodeNames(self.graph)
        self._base_names = Namespace.of_values(base.graph).used
        self.forward: list[ir.Node] = []
        self.e = Emitter(self.graph, opsets=self.graph.opset_imports, target=target)

    def restart(self) -> None:
        """Read the order of the nodes anew, after a change in their midst."""
        self.e = Emitter(self.graph, opsets=self.graph.opset_imports, target=self.target)
        self.values = named_values(self.graph)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def input(self, port: Port, default: np.ndarray | ir.TensorProtocol | None = None) -> ir.Value:
        """A new input, with the value that it takes when none is fed; the same again if it is there already."""
        found = next((v for v in self.inputs if v.name == port.name), None)
        if found is not None:
            return found
        shape = None if port.shape is None else ir.Shape(port.shape)
        dtype = ir.DataType.from_numpy(np.dtype(port.dtype))
        value = ir.Value(name=port.name, shape=shape, type=ir.TensorType(dtype))
        if default is not None:
            value.const_value = ir.Tensor(default, name=port.name) if isinstance(default, np.ndarray) else default
            self.graph.register_initializer(value)
        self.graph.inputs.append(value)  # at once: the emitter must not take a default for a constant
        self._reserve(port.name)
        self.inputs.append(value)
        return value

    def _reserve(self, name: str) -> None:
        """Keep onnx_ir, which names what is emitted, from a name: of inputs that are added it does not know them."""
        holder = ir.Node("", "Identity", [], outputs=[ir.Value(name=name)])
        self.graph.append(holder)
        self.graph.remove(holder)

    def feedable(self, name: str) -> ir.Value:
        """An initializer of the model that becomes an input too, with the stored value as its default."""
        value = self.values[name]
        if value not in self.inputs:
            self.graph.inputs.append(value)
            self.inputs.append(value)
        return value

    # -- outputs -------------------------------------------------------------------------------------------------------

    def output(self, value: ir.Value, name: str) -> ir.Value:
        """Give out `value` under `name`; a value that has a name of its own goes through an Identity."""
        own = value.name in self._base_names or value in self.outputs
        if value.name != name and own:
            value = self.copy(value)
        value.name = name
        self.outputs.append(value)
        return value

    def copy(self, value: ir.Value) -> ir.Value:
        """The value again, as the result of a node."""
        node = ir.Node("", "Identity", [value], num_outputs=1)
        self.e.place(node)
        return self.e.typed(node.outputs[0], value)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def named(self, prefix: str) -> Iterator[None]:
        """Nodes emitted inside are named `<prefix>/<operator>`, with numbers."""
        start = len(self.e.emitted)
        yield
        self.node_names.give(self.e.emitted[start:], prefix)

    def seal(self, options: Options, manifest: Manifest) -> ir.Model:
        """Lower, verify and return the model."""
        graph = self.graph
        graph.outputs.clear()
        graph.outputs.extend(self.outputs)
        graph.inputs.clear()
        order = {name: i for i, name in reversed(list(enumerate(manifest.inputs())))}
        graph.inputs.extend(sorted(self.inputs, key=lambda v: order[v.name or ""]))
        complete(self.m, self.base, options, self.target, forward=self.forward or None)
        self.m.metadata_props[MANIFEST] = manifest.to_json()
        return self.m
