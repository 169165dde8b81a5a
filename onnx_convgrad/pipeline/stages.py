"""Run the stages of a transformation: load, differentiate, and those in `pipeline.complete`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.base.names import as_names
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import merge_again
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.lowering.loops import undo_loops
from onnx_convgrad.pipeline.budgeted import within_budget
from onnx_convgrad.pipeline.built import Built, Mode, target_of
from onnx_convgrad.pipeline.complete import STAGES, Stage
from onnx_convgrad.pipeline.differentiate import differentiate
from onnx_convgrad.pipeline.options import Options


@judged
def build(
    model: AnyModel,
    options: Options,
    *,
    mode: Mode | None = "vjp",
    stages: Sequence[Stage] = (differentiate, *STAGES),
) -> Built:
    """Load a model and run stages on its canonical form; errors as for `onnx_convgrad.augment`.

    Args:
        model: As for `onnx_convgrad.load`.
        options: The arguments of the transformation.
        mode: Which transformation; `None` if no stage differentiates the model as a whole.
        stages: By default all.
    """
    loaded = load(model)
    wanted_again = loaded is model or options.memory.budget is not None

    def start(options: Options, target: TargetInfo) -> Built:
        m = copied_canonical(loaded) if wanted_again else loaded.canonical
        return Built(m, options, target, primal=m, loaded=loaded, mode=mode)

    return within_budget(options, target_of(options), start, (prepare, *stages))


def copied_canonical(loaded: Model) -> ir.Model:
    """A copy of the canonical model, with what the loading noted about it."""
    m = cloned(loaded.canonical)
    m.meta.update(loaded.canonical.meta)
    return m


def prepare(built: Built) -> None:
    """Write loops of an earlier result as the operators that they compute; if `wrt` is inputs, merge parameters again."""
    wrt, graph = built.options.wrt, built.model.graph
    names = wrt if isinstance(wrt, Mapping) else as_names(wrt, "wrt")
    if not set(names) - {"inputs", *(value.name for value in graph.inputs)}:
        merge_again(graph)
    undo_loops(built.model)
