"""The command `train`: its options are the fields of `Config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.tables import Output
from onnx_convgrad.cli.train_config import PANELS, Config


@command(panels=PANELS, verbose="every layer before the first step.")
def train(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)] = None,
    *,
    given: Annotated[dict[str, Any], Config],
    resume: Annotated[
        Path | None, own_option("FOLDER", "Continue the run in this folder; no other option is needed.")
    ] = None,
    config: Annotated[
        Path | None,
        own_option("TOML", "A file with any options of --help-all; the command line overrides it."),
    ] = None,
    find_lr: Annotated[
        bool, own_option("--find-lr", "Only search for a learning rate; --plot FILE draws the search.")
    ] = False,
    out: Output,
) -> int:
    """Train a model.

    Exit status 130 after Ctrl-C and 143 after SIGTERM: everything is saved. 3: the loss or a parameter is not finite.

    \b
    Example:
      onnx-convgrad train model.onnx --data train.npz --loss cross_entropy
      onnx-convgrad train model.onnx --data images --validation 0.1 --epochs 5
      onnx-convgrad train model.onnx --data images --find-lr --plot rates.png
      onnx-convgrad train --resume model.train
    """
    from onnx_convgrad.cli import train_run

    given = given if model is None else {"model": model, **given}
    if find_lr:
        return train_run.find_rate(given, config, resume, out)
    return train_run.train(given, config, resume, out)
