"""Clean up a lowered graph, and verify it."""

from __future__ import annotations

from onnx_ir.passes import common

from onnx_convgrad.base.progress import announce
from onnx_convgrad.base.version import __version__
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import first_few
from onnx_convgrad.frontend import verify as checks
from onnx_convgrad.frontend.opset.newer import restore_newer
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import ORIGIN
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.lowering.loops import record_loops
from onnx_convgrad.pipeline.built import Built


def clean_up(built: Built) -> None:
    """Remove unused nodes and name the new ones."""
    announce("verifying")
    m = built.model
    RemoveUnused()(m)
    common.RemoveUnusedOpsetsPass()(m)
    counts: dict[str, int] = {}
    taken = {node.name for node in m.graph}  # the model may be differentiated already
    for node in m.graph:
        origin = node.metadata_props.pop(ORIGIN, None)
        if origin is not None:
            counts[origin] = counts.get(origin, 0) + 1
            while f"{origin}/grad_{counts[origin]}" in taken:
                counts[origin] += 1
            node.name = f"{origin}/grad_{counts[origin]}"
    for node in m.graph.all_nodes():
        node.metadata_props.pop(ORIGIN, None)
    record_loops(m)
    m.producer_name, m.producer_version = "onnx_convgrad", __version__


def restore_operators(built: Built) -> None:
    """Compute the outputs with the operators and the opset of the model, on the CPU."""
    if built.keeps_outputs and not built.options.training and built.target.on_cpu:
        restore_newer(built.model)


def verify(built: Built) -> None:
    """Check that the result is valid ONNX without private operators."""
    if built.target.ordered_sums:
        _warn_of_unordered_sums(built)
    built.checked = checks.verify(built.model, built.primal)


def _warn_of_unordered_sums(built: Built) -> None:
    """Name the sums that no lowering can order: those at indices known only at run time."""
    scatters = (node for node in built.model.graph if is_op(node, "ScatterElements", "ScatterND"))
    unordered = [node.name or "unnamed" for node in scatters if Call(node).string("reduction", "none") == "add"]
    if unordered:
        warn(
            f"On {built.target.name} these nodes still add at repeated indices in no fixed order: {first_few(unordered)}."
        )
