"""Drafts: the graphs of a training program under construction, with new inputs, outputs and named nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.programs.manifest import Manifest, Port


def name_nodes(names: Namespace, nodes: Iterable[ir.Node], prefix: str) -> None:
    """Give new nodes free names `<prefix>/<operator>`, numbered from the second of an operator on."""
    counts: Counter[str] = Counter()
    for node in nodes:
        counts[node.op_type] += 1
        number = f"_{counts[node.op_type]}" if counts[node.op_type] > 1 else ""
        node.name = names.claim(f"{prefix}/{node.op_type}{number}")


class Draft:
    """A private copy of a canonical model that is extended; `seal` turns it into a finished model."""

    def __init__(self, base: ir.Model, target: TargetInfo) -> None:
        self.base, self.target = base, target
        self.m = cloned(base)
        self.graph = self.m.graph
        self.outputs: list[ir.Value] = []
        self.node_names = Namespace.of_nodes(self.graph)
        self._base_names = Namespace.of_values(base.graph).used
        self.forward: list[ir.Node] = []
        self.restart()

    def restart(self) -> None:
        """Create a new emitter, after nodes were inserted elsewhere than at the end."""
        self.e = Emitter(self.graph, opsets=self.graph.opset_imports, target=self.target)
        self.values = named_values(self.graph)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def input(self, port: Port, default: np.ndarray | ir.TensorProtocol | None = None) -> ir.Value:
        """Add an input, with a default value if one is given; return the existing one of this name."""
        existing = next((v for v in self.graph.inputs if v.name == port.name), None)
        if existing is not None:
            return existing
        shape = None if port.shape is None else ir.Shape(port.shape)
        dtype = ir.DataType.from_numpy(np.dtype(port.dtype))
        value = ir.Value(name=port.name, shape=shape, type=ir.TensorType(dtype))
        if default is not None:
            value.const_value = ir.Tensor(default, name=port.name) if isinstance(default, np.ndarray) else default
            self.graph.register_initializer(value)
        self.graph.inputs.append(value)  # the emitter would fold an initializer that is not an input
        # The graph's name authority, which names new values, does not see added inputs: a node shows it the name.
        holder = ir.Node("", "Identity", [], outputs=[ir.Value(name=port.name)])
        self.graph.append(holder)
        self.graph.remove(holder)
        return value

    # -- outputs -------------------------------------------------------------------------------------------------------

    def output(self, value: ir.Value, name: str) -> ir.Value:
        """Make `value` an output called `name`; a value of the model or another output is copied by an Identity."""
        if value.name != name and (value.name in self._base_names or value in self.outputs):
            value = self.e.copied(value)
        value.name = name
        self.outputs.append(value)
        return value

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def named(self, prefix: str) -> Iterator[None]:
        """Name the nodes that are emitted inside `<prefix>/<operator>`."""
        start = len(self.e.emitted)
        yield
        name_nodes(self.node_names, self.e.emitted[start:], prefix)

    def seal(self, options: Options, manifest: Manifest) -> Built:
        """Set inputs and outputs; return the state for the stages after differentiation."""
        graph = self.graph
        graph.outputs.clear()
        graph.outputs.extend(self.outputs)
        order = {name: i for i, name in enumerate(manifest.inputs())}
        inputs = sorted(graph.inputs, key=lambda v: order.get(v.name or "", len(order)))
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        following = {s.next: s.name for s in manifest.moving() if getattr(s, "kind", "optimizer") == "optimizer"}
        return Built(self.m, options, self.target, self.base, forward=self.forward or None, following=following)
