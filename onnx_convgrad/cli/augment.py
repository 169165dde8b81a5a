"""The command `augment`: write a model with its gradients."""

from __future__ import annotations

from dataclasses import replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.shared_options import out_option
from onnx_convgrad.cli.tables import Output, Table, shape_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.options import Loading, Options

if TYPE_CHECKING:
    from onnx_convgrad.pipeline.built import Built


@command(verbose="all operators and gradients.")
def augment(
    model: Model,
    output: Annotated[
        Path | None, out_option("the model with gradients. [default: <stem>.grad.onnx beside the model]")
    ] = None,
    *,
    options: Options,
    loading: Loading,
    check: Annotated[bool, own_option("--check", "Check the gradients numerically afterwards.")] = False,
    out: Output,
) -> int:
    """Write the model with its gradients as further outputs.

    \b
    Example:
      onnx-convgrad augment model.onnx
      onnx-convgrad augment model.onnx -o saliency.onnx --wrt inputs --cotangents ones
    """
    from onnx_convgrad.checking.check import verify_numerically
    from onnx_convgrad.cli.check import show as show_check
    from onnx_convgrad.cli.rewrite import rewrite
    from onnx_convgrad.frontend.quantizers import is_quantizer
    from onnx_convgrad.frontend.roles import parameters
    from onnx_convgrad.ir.notes import DERIVATIVE_INPUTS, is_detach
    from onnx_convgrad.pipeline.stages import build

    if check and options.per_sample:
        raise ArgumentError("--check covers ordinary gradients only.", hint="Omit --per-sample and --squared-norm.")

    built, rewritten = rewrite(model, output, out, lambda: build(loading.load(model), options))
    stored = [v.const_value for v in parameters(built.primal.graph) if v.const_value is not None]
    rewritten = replace(rewritten, parameters=sum(tensor.size for tensor in stored))
    report = None
    if check:
        with out.stages():
            checked = built
            # the numeric derivative of a quantizer is that of a step function, and detached values vary, too
            if any(is_quantizer(node) or is_detach(node) for node in built.primal.graph):
                checked = build(loading.load(model), replace(options, straight_through=False))
            report = verify_numerically(checked, model)
    gradients = _gradient_rows(built)
    result = report.to_dict() if report else None
    out.print_json({**rewritten.to_dict(), "gradients": gradients, "check": result})
    rewritten.show(out)
    cotangents = loads(built.model.metadata_props[DERIVATIVE_INPUTS])
    out.line()
    out.line(f"Cotangents to feed: {', '.join(f'{name} (of {v})' for v, name in cotangents.items()) or 'none'}")
    out.line()
    rows = [[row["value"], row["output"], shape_text(row["shape"]), row["dtype"] or "?"] for row in gradients]
    out.table(Table(["gradient of", "output", "shape", "dtype"], rows), fold=8)
    if report:
        out.line()
        show_check(report, out)
    return 0 if report is None or report.passed else 1


def _gradient_rows(built: Built) -> list[dict[str, Any]]:
    """Per gradient: the value, the output that holds it, its dtype and shape."""
    from onnx_convgrad.cli.rewrite import described
    from onnx_convgrad.ir.namespace import named_values

    values = named_values(built.model.graph)
    found = {value: described(values[output]) for value, output in built.gradients.items()}
    return [{"value": value, "output": d.pop("name"), **d} for value, d in found.items()]
