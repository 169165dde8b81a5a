"""The options of `bench`. As in `onnx_convgrad.cli`, everything but typer is imported inside."""

# ruff: noqa: D301, FBT002 - click wants a backspace before examples; flags are booleans

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_convgrad.cli.arguments import (
    Json,
    Lowering,
    Of,
    Quiet,
    Shapes,
    TrainableInputs,
    Training,
    Workspace,
    Wrt,
    arguments,
)
from onnx_convgrad.cli.guard import guarded

__all__ = ["bench"]


def bench(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)] = None,
    wrt: Wrt = [],  # noqa: B006
    of: Of = [],  # noqa: B006
    training: Training = False,
    trainable_inputs: TrainableInputs = False,
    lowering: Lowering = [],  # noqa: B006
    max_workspace: Workspace = None,
    input_shape: Shapes = [],  # noqa: B006
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of every side. [default: the cores]", show_default=False)
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Turns of which the median is taken.")] = 5,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Compare with PyTorch where installed.")] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw it: a .png, .svg or .pdf file.", show_default=False)
    ] = None,
    save_lowerings: Annotated[
        Path | None,
        typer.Option("--save-lowerings", help="Write the fastest, as a .json file for --lowering.", show_default=False),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First measure this machine's speeds, by which lowerings are chosen.")
    ] = False,
    provider: Annotated[
        str, typer.Option("--provider", help="Whose speeds --calibrate measures: cpu or cuda.")
    ] = "cpu",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every lowering.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Time a model, its gradients and each convolution on the CPU.

    \b
    Example:
      onnx-convgrad bench model.onnx --input-shape image:8,3,224,224 --plot model.png
      onnx-convgrad bench model.onnx --save-lowerings fast.json
      onnx-convgrad bench --calibrate
      onnx-convgrad bench --calibrate --provider cuda
    """
    with guarded():
        from onnx_convgrad.cli import bench as command
        from onnx_convgrad.cli.tables import Output
        from onnx_convgrad.lowering.cost.calibration import cores

        if calibrate:
            told = Output(quiet=quiet, json=json)
            command.calibration(told, provider=provider, threads=threads or cores(), json=json and not model)
        if model is None:
            command.need_model(calibrate=calibrate)
            return
        given = arguments(wrt, of, training, "cpu", lowering, input_shape, max_workspace)
        command.command(
            model,
            {**given, "trainable_inputs": trainable_inputs},
            Output(quiet=quiet, json=json),
            threads=threads or cores(),
            repeats=repeat,
            torch=torch,
            picture=plot,
            saved=save_lowerings,
            every=verbose,
            json=json,
        )
