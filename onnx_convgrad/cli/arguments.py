"""Options that several commands have, and what they say to the transformations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "Json",
    "Lowering",
    "Model",
    "Of",
    "PerSample",
    "Quiet",
    "Recompute",
    "Shapes",
    "SquaredNorm",
    "Target",
    "TrainableInputs",
    "Training",
    "Verbose",
    "Workspace",
    "Wrt",
    "arguments",
]

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]
Wrt = Annotated[
    list[str],
    typer.Option("--wrt", help="parameters, inputs, all, or names and globs of values; repeat or separate by commas."),
]
Of = Annotated[list[str], typer.Option("--of", help="Values to differentiate. [default: every floating output]")]
Training = Annotated[bool, typer.Option("--training", help="BatchNormalization and Dropout in training mode.")]
TrainableInputs = Annotated[
    bool, typer.Option("--trainable-inputs", help="Make the differentiated weights graph inputs too.")
]
Target = Annotated[str, typer.Option("--target", help="cpu, cuda, web or portable.")]
Lowering = Annotated[
    list[str],
    typer.Option(
        "--lowering",
        metavar="OP=NAME",
        help="Force a lowering (see `explain`), or `exact`, or a file from `bench --save-lowerings`.",
    ),
]
Workspace = Annotated[
    str | None,
    typer.Option(
        "--max-workspace", metavar="SIZE", help="Most that one lowering may hold, such as 256MB; see `explain`."
    ),
]
Recompute = Annotated[
    list[str],
    typer.Option(
        "--recompute",
        metavar="NAME",
        help="auto, or names and globs of forward values to compute again rather than keep; repeat or use commas.",
    ),
]
Shapes = Annotated[
    list[str],
    typer.Option("--input-shape", metavar="NAME:1,3,H,W", help="Shape of an input: numbers, symbols or ?. Repeatable."),
]
PerSample = Annotated[
    bool, typer.Option("--per-sample", help="One gradient per sample for each parameter: a leading batch axis.")
]
SquaredNorm = Annotated[
    bool, typer.Option("--squared-norm", help="Of each sample's gradient only the squared norm; implies --per-sample.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Fold nothing.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors and warnings only.")]


def arguments(
    wrt: Sequence[str],
    of: Sequence[str],
    training: bool,
    target: str,
    lowering: Sequence[str],
    input_shape: Sequence[str],
    max_workspace: str | None = None,
    recompute: Sequence[str] = (),
) -> dict[str, Any]:
    """The keywords of the transformations; raises `ArgumentError` for text that is none."""
    from onnx_convgrad.cli import options

    return {
        "wrt": options.names(wrt, "parameters"),
        "of": options.of_names(of),
        "training": training,
        "target": target,
        "lowering": options.chosen_lowering(lowering),
        "input_shapes": options.input_shapes(input_shape),
        **({} if max_workspace is None else {"max_workspace": options.size_in_bytes(max_workspace)}),
        **({"recompute": options.recomputed(recompute)} if recompute else {}),
    }
