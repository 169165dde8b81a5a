"""The command `lower`: replace ONNX's training operators by plain ones (tool: may change in a minor version)."""

from __future__ import annotations

from dataclasses import asdict, fields
from json import loads
from pathlib import Path
from typing import Annotated

from onnx_convgrad.cli.command import Model, command
from onnx_convgrad.cli.shared_options import out_option
from onnx_convgrad.cli.tables import Output, Table
from onnx_convgrad.pipeline.options import Loading, Options, Target, options_of


@command(
    leave=[f.name for f in options_of(Options) if f not in fields(Target)],
    verbose="all operators and gradients.",
)
def lower(
    model: Model,
    output: Annotated[
        Path | None, out_option("the lowered model. [default: <stem>.lowered.onnx beside the model]")
    ] = None,
    *,
    options: Options,
    loading: Loading,
    out: Output,
) -> None:
    """Replace ONNX's training operators by plain ones.

    These are Gradient, Adam, Adagrad and Momentum, which ONNX Runtime cannot run. A training algorithm that is stored
    beside the graph (training_info) is combined with it into one step.

    \b
    Example:
      onnx-convgrad lower step.onnx
    """
    from onnx_convgrad.cli.rewrite import rewrite
    from onnx_convgrad.gradient_ops.lower import lower_training_operators
    from onnx_convgrad.ir.notes import UPDATES

    shapes, values = loading.input_shapes, loading.input_values
    lowered, rewritten = rewrite(
        model, output, out, lambda: lower_training_operators(model, options, shapes, values), "lowered"
    )
    updates: dict[str, str] = loads(lowered.model.metadata_props.get(UPDATES, "{}"))
    more = {
        "operators": lowered.operators,
        "gradients": [asdict(d) for d in lowered.derivatives],
        "updates": updates,
    }
    out.print_json({**rewritten.to_dict(), **more})
    rewritten.show(out)
    listed = ", ".join(f"{count} {op}" for op, count in sorted(lowered.operators.items()))
    out.line()
    out.line(f"Lowered: {listed or 'nothing, the model has no such operators'}.")
    if updates:
        named = ", ".join(f"{value} is the next {key}" for key, value in updates.items())
        out.line(f"The training algorithm is part of the graph now: {named}.")
    if lowered.derivatives:
        out.line()
        rows = [[d.y, d.x, d.output, d.node] for d in lowered.derivatives]
        out.table(Table(["gradient of", "by", "is", "node"], rows), fold=8)
