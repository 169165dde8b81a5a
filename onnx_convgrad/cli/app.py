"""The commands. Everything but typer is imported inside them, so that `--help` answers at once.

Exit status: 0 done; 1 a check failed; 2 bad arguments or an unusable model; 3 something cannot be differentiated;
130, 143 training was interrupted by SIGINT, SIGTERM and everything is saved.
"""

# ruff: noqa: D301, FBT002, T201 - click wants a backspace before examples; flags are booleans; commands print

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_convgrad.cli.arguments import (
    Json,
    Lowering,
    Model,
    Of,
    PerSample,
    Quiet,
    Recompute,
    Shapes,
    SquaredNorm,
    Target,
    TrainableInputs,
    Training,
    Verbose,
    Workspace,
    Wrt,
    arguments,
)
from onnx_convgrad.cli.bench_options import bench
from onnx_convgrad.cli.guard import guarded
from onnx_convgrad.cli.train_options import train

__all__ = ["app", "main"]

app = typer.Typer(
    name="onnx-convgrad",
    help="Gradients of ONNX models as ONNX models, out of plain ai.onnx operators.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from onnx_convgrad import __version__

        print(f"onnx-convgrad {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def augment(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write. [default: <stem>.grad.onnx beside the model]")
    ] = None,
    wrt: Wrt = [],  # noqa: B006 - typer's way of saying "repeatable"
    of: Of = [],  # noqa: B006
    seed: Annotated[
        str | None, typer.Option("--seed", help="ones: seed every target with ones, without seed inputs.")
    ] = None,
    training: Training = False,
    per_sample: PerSample = False,
    squared_norm: SquaredNorm = False,
    trainable_inputs: TrainableInputs = False,
    target: Target = "cpu",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="No sum whose order differs from run to run on a GPU.")
    ] = False,
    lowering: Lowering = [],  # noqa: B006
    max_workspace: Workspace = None,
    recompute: Recompute = [],  # noqa: B006
    input_shape: Shapes = [],  # noqa: B006
    check: Annotated[bool, typer.Option("--check", help="Verify the gradients numerically afterwards.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write the model with its gradients as further outputs.

    \b
    Example:
      onnx-convgrad augment model.onnx
      onnx-convgrad augment model.onnx -o saliency.onnx --wrt inputs --seed ones
    """
    with guarded():
        from onnx_convgrad.cli import augment
        from onnx_convgrad.cli.tables import Output

        given = arguments(wrt, of, training, target, lowering, input_shape, max_workspace, recompute)
        status = augment.run(
            model,
            output,
            {
                **given,
                "seed": seed,
                "trainable_inputs": trainable_inputs,
                "deterministic": deterministic,
                "per_sample": "squared_norm" if squared_norm else per_sample,
            },
            Output(quiet=quiet, json=json),
            check=check,
            every=verbose,
            json=json,
        )
    raise typer.Exit(status)


@app.command()
def explain(
    model: Model,
    wrt: Wrt = [],  # noqa: B006
    of: Of = [],  # noqa: B006
    training: Training = False,
    trainable_inputs: TrainableInputs = False,
    per_sample: PerSample = False,
    squared_norm: SquaredNorm = False,
    target: Target = "cpu",
    lowering: Lowering = [],  # noqa: B006
    max_workspace: Workspace = None,
    recompute: Recompute = [],  # noqa: B006
    input_shape: Shapes = [],  # noqa: B006
    placement: Annotated[
        bool,
        typer.Option("--placement", help="Also show which provider runs each node, and what fell back to the CPU."),
    ] = False,
    providers: Annotated[
        list[str],
        typer.Option(
            "--providers", metavar="NAME", help="Ask ONNX Runtime about these: cuda, cpu. Implies --placement."
        ),
    ] = [],  # noqa: B006
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the lowerings that do not apply, and why.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show how each convolution gradient would be computed.

    \b
    Example:
      onnx-convgrad explain model.onnx --target cuda --input-shape image:8,3,224,224
      onnx-convgrad explain model.onnx --target cuda --placement
    """
    with guarded():
        from onnx_convgrad.cli import explain, options
        from onnx_convgrad.cli.tables import Output

        given = arguments(wrt, of, training, target, lowering, input_shape, max_workspace, recompute)
        explain.run(
            model,
            {
                **given,
                "trainable_inputs": trainable_inputs,
                "per_sample": "squared_norm" if squared_norm else per_sample,
            },
            Output(quiet=quiet, json=json),
            json=json,
            every=verbose,
            placed=placement,
            providers=options.of_names(providers) or (),
        )


@app.command()
def lower(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write. [default: <stem>.lowered.onnx beside the model]"),
    ] = None,
    target: Target = "cpu",
    lowering: Lowering = [],  # noqa: B006
    max_workspace: Workspace = None,
    input_shape: Shapes = [],  # noqa: B006
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write ONNX's training operators with plain ones.

    These are Gradient, Adam, Adagrad and Momentum, which ONNX Runtime cannot run. A training algorithm that the file
    carries beside the graph (training_info) is combined with it into one step.

    \b
    Example:
      onnx-convgrad lower step.onnx
    """
    with guarded():
        from onnx_convgrad.cli import lower, options
        from onnx_convgrad.cli.tables import Output

        given = {
            "target": target,
            "lowering": options.chosen_lowering(lowering),
            "max_workspace": options.size_in_bytes(max_workspace),
            "input_shapes": options.input_shapes(input_shape),
        }
        lower.run(model, output, given, Output(quiet=quiet, json=json), every=verbose, json=json)


@app.command()
def check(
    model: Model,
    wrt: Annotated[list[str], typer.Option("--wrt", help="As for augment. [default: all]")] = [],  # noqa: B006
    of: Of = [],  # noqa: B006
    training: Training = False,
    target: Target = "cpu",
    lowering: Lowering = [],  # noqa: B006
    input_shape: Shapes = [],  # noqa: B006
    seed_value: Annotated[int, typer.Option("--seed-value", min=0, help="Of the random inputs and directions.")] = 0,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random directions per value.")] = 1,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare gradients with numeric ones and PyTorch's.

    \b
    Example:
      onnx-convgrad check model.onnx --input-shape image:2,3,64,64
    """
    with guarded():
        from onnx_convgrad.cli import check
        from onnx_convgrad.cli.tables import Output

        given = arguments(wrt or ["all"], of, training, target, lowering, input_shape)
        status = check.run(
            model,
            {**given, "seed": seed_value, "samples": samples},
            Output(quiet=quiet, json=json),
            every=verbose,
            json=json,
        )
    raise typer.Exit(status)


app.command()(bench)
app.command()(train)


@app.command()
def rules(
    operator: Annotated[str | None, typer.Argument(metavar="OP", help="Show one operator.", show_default=False)] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """List the operators that can be differentiated.

    \b
    Example:
      onnx-convgrad rules Conv
    """
    with guarded():
        from onnx_convgrad.cli import rules
        from onnx_convgrad.cli.tables import Output

        rules.run(operator, Output(quiet=quiet, json=json), json=json)


def main(arguments: Sequence[str] | None = None) -> None:
    """The script `onnx-convgrad`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of values that the terminal's encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(args=arguments, prog_name="onnx-convgrad", standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except Exception as problem:
        explained = getattr(problem, "format_message", None)  # of a usage error, whichever click raised it
        if explained is None:
            raise
        print(_usage_error(explained(), getattr(problem, "ctx", None)), file=sys.stderr)
        status = getattr(problem, "exit_code", 2)
    sys.exit(status or 0)


def _usage_error(message: str, context: Any) -> str:
    """One line; the help itself when there was no command at all."""
    if message.startswith("Usage:"):
        return message
    where = f" See `{context.command_path} --help`." if context is not None else ""
    end = "" if message.endswith("?") else "."
    return f"Error: {message.rstrip('.')}{end}{where}"
