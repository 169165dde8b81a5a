"""The outputs of a graph by their places."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["OutputPlaces"]


class OutputPlaces:
    """Where the outputs of a graph stand: to replace one of thousands without a look at all of them.

    Outputs may only be replaced through it while it is in use.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._outputs = graph.outputs
        self._places: dict[ir.Value, list[int]] = {}
        for place, value in enumerate(graph.outputs):
            self._places.setdefault(value, []).append(place)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Put `new` in the place of `old`, for all that use it and among the outputs."""
        for place in self._places.pop(old, ()):
            self._outputs[place] = new
            self._places.setdefault(new, []).append(place)
        # onnx_ir still takes for an output what `del graph.outputs[:]` has taken away
        old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())
