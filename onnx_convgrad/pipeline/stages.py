"""Run the stages of a transformation: read, canonicalize, differentiate, and those in `pipeline.complete`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_convgrad.base.names import as_names
from onnx_convgrad.base.progress import announce, note_step, watched_steps
from onnx_convgrad.frontend.bound_inputs import bind_inputs
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import restore, separate_members
from onnx_convgrad.frontend.files import AnyModel, load
from onnx_convgrad.frontend.verify import verify_shapes
from onnx_convgrad.ir.targets import Target
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
    mode: Mode | None = "augment",
    stages: Sequence[Stage] = (differentiate, *STAGES),
) -> Built:
    """Read a model, bring it to canonical form, and run stages; errors as for `onnx_convgrad.augment`.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`. Never changed.
        options: The arguments of the transformation.
        mode: Which transformation; `None` if no stage differentiates the model as a whole.
        stages: By default all.
    """

    def read(options: Options, target: Target) -> Built:
        announce("reading")
        m = bind_inputs(load(model, options.base_dir), options.input_values)
        note_step("read", "Read the file and bind inputs to constants.", m.graph)
        announce("canonicalizing")
        m = canonical(m, options, lambda: bind_inputs(load(model, options.base_dir), options.input_values))
        return Built(m, options, target, primal=m, mode=mode)

    return within_budget(options, target_of(options), read, stages)


def canonical(m: ir.Model, options: Options, original: Callable[[], ir.Model]) -> ir.Model:
    """Bring a loaded model to canonical form, with an initializer of its own for each parameter that may be in `wrt`."""
    if set(as_names(options.wrt, "wrt")) - {"inputs", *(value.name for value in m.graph.inputs)}:
        restore(m.graph)
    m = canonicalize(m, options.input_shapes)
    if options.input_shapes:
        with watched_steps(lambda *_: None):
            verify_shapes(m, lambda: canonicalize(original()))
    separate_members(m.graph)
    undo_loops(m)
    return m
