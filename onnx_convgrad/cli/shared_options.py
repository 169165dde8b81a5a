"""Options that several commands have. One name has one meaning: a text here, or that of an argument, and details."""

from __future__ import annotations

from typing import Any

from onnx_convgrad.cli.command import own_option

DATA = (
    "Data: images, a folder of images, or of one folder of images per class, .npz, [NAME=]FILE.npy, or a .csv or .tsv "
    "with the columns image and text. Repeatable."
)
LABELS = "A file with one on each line, or a JSON list. [default: the model's or the data's]"
METHOD = "Method"


# Any: typer declares its options as having any type.
def out_option(written: str) -> Any:
    """`-o`, `--out`, where a command writes; `written` says what, and the default."""
    return own_option("-o --out PATH", out_help(written))


def out_help(written: str) -> str:
    """Help text of `-o`, `--out`."""
    return f"Write here: {written}"


def plot_option(drawn: str) -> Any:
    """`--plot`; `drawn` says what the picture shows."""
    return own_option("--plot FILE", plot_help(drawn))


def plot_help(drawn: str) -> str:
    """Help text of `--plot`."""
    return f"Picture to draw, .png, .svg or .pdf: {drawn}."


def top_option(use: str) -> Any:
    """`--top`, a number of labels; `use` says what it is for."""
    return own_option("--top INT", f"Number of most probable labels: {use}.")


def data_option(detail: str = "") -> Any:
    """`--data`, files with samples; `detail` says more of them."""
    return own_option("--data [NAME=]PATH", f"{DATA} {detail}".rstrip())


def provider_option(use: str) -> Any:
    """`--provider`, one execution provider; `use` says what it is for."""
    return own_option("--provider NAME", f"Execution provider: {use}")
