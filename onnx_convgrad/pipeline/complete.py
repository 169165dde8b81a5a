"""The stages after differentiation, in order, and the last of them: clean up and verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from onnx_convgrad.base.progress import announce, note_step
from onnx_convgrad.base.version import __version__
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import first_few
from onnx_convgrad.frontend import verify as checks
from onnx_convgrad.frontend.opset.newer import restore_newer
from onnx_convgrad.frontend.roles import note_constants
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import all_nodes, is_op
from onnx_convgrad.ir.notes import ORIGIN
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.lowering.loops import record_loops
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.fit_memory import fit_memory
from onnx_convgrad.pipeline.rewrites import (
    fit_provider,
    lower,
    narrow_activations,
    recompute,
    simplify,
    sort_nodes,
    write_in_place,
)


def clean_up(built: Built) -> None:
    """Remove unused nodes and name the new ones."""
    announce("verifying")
    m = built.model
    RemoveUnused()(m)
    counts = Counter[str]()
    taken = {node.name for node in m.graph}  # the model may be differentiated already
    for node in m.graph:
        origin = node.metadata_props.pop(ORIGIN, None)
        if origin is not None:
            counts[origin] += 1
            while f"{origin}/grad_{counts[origin]}" in taken:
                counts[origin] += 1
            node.name = f"{origin}/grad_{counts[origin]}"
    domains = {""}
    for node in all_nodes(m.graph):
        node.metadata_props.pop(ORIGIN, None)
        domains.add(node.domain)
    for unused in m.opset_imports.keys() - domains:
        del m.opset_imports[unused]
    record_loops(m)
    note_constants(m)
    m.producer_name, m.producer_version = "onnx_convgrad", __version__


def restore_operators(built: Built) -> None:
    """Compute the outputs with the operators and the opset of the model, on the CPU."""
    if built.keeps_outputs and not built.options.training and built.target.on_cpu:
        restore_newer(built.model)


def verify(built: Built) -> None:
    """Check that the result is valid ONNX without private operators."""
    if built.target.ordered_sums:  # no lowering can order those at indices known only at run time
        scatters = (node for node in built.model.graph if is_op(node, "ScatterElements", "ScatterND"))
        unordered = [node.name or "unnamed" for node in scatters if Call(node).string("reduction", "none") == "add"]
        if unordered:
            name = built.target.name
            warn(f"On {name} these nodes still add at repeated indices in no fixed order: {first_few(unordered)}.")
    built.checked = checks.verify(built.model, built.primal)


# -- the list ----------------------------------------------------------------------------------------------------------

Stage = Callable[[Built], None]
"""Changes a model in place and notes what it decided; its name and the first line of its docstring are shown by `view`."""

STAGES: tuple[Stage, ...] = (
    simplify,
    fit_memory,
    lower,
    narrow_activations,
    recompute,
    fit_provider,
    write_in_place,
    clean_up,
    sort_nodes,
    restore_operators,
    verify,
)


def complete(built: Built, stages: Sequence[Stage] = STAGES) -> Built:
    """Run stages, by default those after differentiation; return the same object."""
    for stage in stages:
        stage(built)
        note_step(stage.__name__.replace("_", " "), stage.__doc__ or "", built.model.graph)
    return built
