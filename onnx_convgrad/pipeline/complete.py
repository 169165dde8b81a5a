"""The stages after differentiation, in order: a list of passes over one `Built`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx_convgrad.base.progress import note_step
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.finish import clean_up, restore_operators, verify
from onnx_convgrad.pipeline.fit_memory import fit_memory, narrow_activations, recompute, sort_nodes, write_in_place
from onnx_convgrad.pipeline.fit_provider import fit_provider
from onnx_convgrad.pipeline.lower import lower, simplify

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
