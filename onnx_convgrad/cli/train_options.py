"""The options of `train`. As in `onnx_convgrad.cli`, everything but typer is imported inside."""

# ruff: noqa: D301, FBT002 - click wants a backspace before examples; flags are booleans

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_convgrad.cli.guard import guarded

__all__ = ["train"]


def _option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, **more)


def train(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)] = None,
    data: Annotated[
        list[str] | None,
        _option(
            "--data",
            metavar="[NAME=]PATH",
            help=".npz, .npy (one option for each), or a folder with images in a folder per class.",
        ),
    ] = None,
    validation: Annotated[
        list[str] | None,
        _option(
            "--validation", metavar="[NAME=]PATH|SHARE", help="The same to evaluate on, or a share to hold out: 0.1."
        ),
    ] = None,
    map: Annotated[  # noqa: A002 - called what the option is called, so that TOML says the same
        list[str] | None,
        _option("--map", metavar="INPUT=ARRAY", help="Which array an input takes, where names and order do not say."),
    ] = None,
    loss: Annotated[
        list[str] | None,
        _option(
            "--loss",
            metavar="[OUTPUT=]NAME",
            help="mse, l1, huber, cross_entropy, nll, bce_with_logits, or a scalar of the model; "
            "OUTPUT=0.5*NAME for each of several.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None, _option("--optimizer", metavar="NAME", help="sgd, adam, adamw, rmsprop, adagrad. [default: adamw]")
    ] = None,
    lr: Annotated[float | None, _option("--lr", help="Learning rate. [default: 0.001]")] = None,
    momentum: Annotated[float | None, _option("--momentum", help="Of sgd and rmsprop.")] = None,
    weight_decay: Annotated[float | None, _option("--weight-decay", help="[default: the optimizer's]")] = None,
    clip_norm: Annotated[float | None, _option("--clip-norm", help="Largest norm of all gradients together.")] = None,
    schedule: Annotated[
        str | None, _option("--schedule", metavar="NAME", help="constant, cosine, step, onecycle. [default: constant]")
    ] = None,
    warmup: Annotated[int | None, _option("--warmup", metavar="STEPS", help="Linear, before the schedule.")] = None,
    epochs: Annotated[int | None, _option("--epochs", help="In all, also when resumed. [default: 10]")] = None,
    batch_size: Annotated[
        int | None, _option("--batch-size", help="[default: the model's, or 32 where it takes any]")
    ] = None,
    accumulate: Annotated[int | None, _option("--accumulate", help="Batches for one update.")] = None,
    shuffle: Annotated[bool | None, _option("--shuffle/--no-shuffle", help="[default: shuffle]")] = None,
    wrt: Annotated[
        list[str] | None, _option("--wrt", metavar="NAMES", help="Names and globs to train. [default: parameters]")
    ] = None,
    freeze: Annotated[
        list[str] | None, _option("--freeze", metavar="NAMES", help="Names and globs not to train.")
    ] = None,
    freeze_statistics: Annotated[
        bool | None, _option("--freeze-statistics", help="BatchNormalization keeps its running statistics.")
    ] = None,
    precision: Annotated[
        str | None,
        _option("--precision", metavar="NAME", help="float32; float16, bfloat16: mixed. [default: float32]"),
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="Of order, split and Dropout. [default: 0]")] = None,
    metric: Annotated[
        list[str] | None,
        _option("--metric", metavar="NAME", help="accuracy, topK, none. [default: accuracy of classes]"),
    ] = None,
    patience: Annotated[
        int | None,
        _option("--patience", metavar="EPOCHS", help="Stop when the loss has not fallen for so long."),
    ] = None,
    out: Annotated[
        str | None, _option("-o", "--out", metavar="FOLDER", help="[default: <stem>.train beside the model]")
    ] = None,
    checkpoint_every: Annotated[
        int | None, _option("--checkpoint-every", metavar="STEPS", help="[default: after each epoch only]")
    ] = None,
    keep: Annotated[int | None, _option("--keep", help="Checkpoints that are kept. [default: 3]")] = None,
    resume: Annotated[
        Path | None,
        _option("--resume", metavar="FOLDER", help="Go on with the run in this folder; nothing else is needed."),
    ] = None,
    config: Annotated[
        Path | None, _option("--config", metavar="TOML", help="A file with these options; the command line wins.")
    ] = None,
    plot: Annotated[
        str | None, _option("--plot", metavar="FILE", help="Draw loss and metrics: .png, .svg, .pdf.")
    ] = None,
    log: Annotated[
        str | None, _option("--log", metavar="FILE", help=".csv or .jsonl. [default: history.csv in the folder]")
    ] = None,
    tensorboard: Annotated[
        str | None, _option("--tensorboard", metavar="FOLDER", help="Write for TensorBoard too.")
    ] = None,
    providers: Annotated[
        list[str] | None, _option("--providers", metavar="NAMES", help="cpu, cuda, cuda:1 or ONNX Runtime's names.")
    ] = None,
    threads: Annotated[int | None, _option("--threads", help="Of the CPU. [default: the cores]")] = None,
    target: Annotated[
        str | None, _option("--target", metavar="NAME", help="cpu, cuda, web, portable. [default: the first provider]")
    ] = None,
    input_shape: Annotated[
        list[str] | None,
        _option("--input-shape", metavar="NAME:N,3,H,W", help="Shape of an input: numbers, symbols or ?. Repeatable."),
    ] = None,
    image_size: Annotated[
        str | None, _option("--image-size", metavar="HxW", help="Of images, where the model takes any size.")
    ] = None,
    resize: Annotated[
        int | None, _option("--resize", help="Shorter side of images before the middle is cut out.")
    ] = None,
    mean: Annotated[
        str | None, _option("--mean", metavar="R,G,B", help="Subtracted from images in [0, 1]. [default: 0]")
    ] = None,
    std: Annotated[str | None, _option("--std", metavar="R,G,B", help="Divides them then. [default: 1]")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print errors and warnings only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Train a model.

    Exit status 130 after Ctrl-C and 143 after SIGTERM: everything is saved. 1: the loss is not a number.

    \b
    Example:
      onnx-convgrad train model.onnx --data train.npz --validation 0.1 --loss cross_entropy --epochs 5
      onnx-convgrad train --resume model.train
    """
    given = {k: v for k, v in locals().items() if k not in ("resume", "config", "quiet", "json")}
    with guarded():
        from onnx_convgrad.cli import options
        from onnx_convgrad.cli import train as command
        from onnx_convgrad.cli.tables import Output

        given["providers"] = options.of_names(providers or [])
        given |= {name: options.numbers(f"--{name}", given[name]) for name in ("mean", "std")}
        status = command.command(given, config, resume, Output(quiet=quiet, json=json), json=json)
    raise typer.Exit(status)
