"""The names in the folder of a training run, and which of its files is the trained model."""

from __future__ import annotations

from pathlib import Path

from onnx_convgrad.base.forms import parse_json
from onnx_convgrad.base.paths import read_text
from onnx_convgrad.errors import ArgumentError

CONFIG, PROGRAM, CHECKPOINTS, HISTORY = "train.toml", "program", "checkpoints", "history.csv"
TRAINED, BEST, CLASSES, CARD = "trained.onnx", "best.onnx", "classes.json", "README.md"

_LONGEST = 2**24
"""Most bytes of a file with names of classes."""


def trained_file(folder: Path) -> Path | None:
    """The best model of a run, else the trained one; `None` if the run has only checkpoints.

    Raises:
        ArgumentError: It is not the folder of a run.
    """
    for name in (BEST, TRAINED):
        if (folder / name).is_file():
            return folder / name
    if (folder / PROGRAM).is_dir() and (folder / CHECKPOINTS).is_dir():
        return None
    raise ArgumentError(
        f"{str(folder)!r} is not the folder of a run: it has neither {BEST} nor {TRAINED}, nor {PROGRAM} and {CHECKPOINTS}.",
        hint="Name an ONNX file, or the folder that `train` printed.",
    )


def class_names(folder: Path) -> tuple[str, ...] | None:
    """The names of the classes that a run has stored; `None` if it has none."""
    path = folder / CLASSES
    if not path.is_file():
        return None
    return read_labels(path)


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the names of classes: a JSON list, or a text with one name on each line.

    Raises:
        ArgumentError: It cannot be read.
    """
    try:
        text = read_text(path, _LONGEST)
        names = (
            parse_json(text, [str]) if text.lstrip().startswith("[") else [n.strip() or n for n in text.splitlines()]
        )
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else f"{problem}"
        raise ArgumentError(
            f"The names of classes in {str(path)!r} could not be read: {reason.rstrip('.')}.",
            hint="Give a text file with one name on each line, or a JSON list.",
        ) from None
    while names and not names[-1]:
        names.pop()
    if not names:
        raise ArgumentError(f"{str(path)!r} holds no names of classes.", hint="Write one on each line.")
    return tuple(names)
