"""The frame and the colors that pictures share, and the check whether a picture can be drawn; nothing slow is imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnx_convgrad.base.optional import install
from onnx_convgrad.errors import ArgumentError, ExecutionError, shown

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
OURS, CONTRAST = "#0b6e99", "#e4572e"

_STYLE: Any = {
    "figure.dpi": 150, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlecolor": INK,
    "axes.titlepad": 8, "axes.labelsize": 8, "axes.labelcolor": FAINT, "xaxis.labellocation": "left",
    "legend.frameon": False, "legend.fontsize": 8.5, "legend.labelcolor": INK,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{f"{axis}tick.{name}.size": 0 for axis in "xy" for name in ("major", "minor")},
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in (("labelsize", 8), ("color", FAINT))},
}  # fmt: skip
"""Settings of the plots that are not those of matplotlib itself."""

_SUFFIXES = (".png", ".svg", ".pdf")


def check_file(path: Path, what: str, suffixes: Sequence[str]) -> None:
    """Refuse, before any work, a file that cannot be written or has another suffix; `what` says what is written."""
    from onnx_convgrad.frontend.files import check_folder

    if path.suffix.lower() not in suffixes:
        raise ArgumentError(
            f"{what} cannot be written as {path.name or str(path)!r}.", hint=f"Use {', '.join(suffixes)}."
        )
    check_folder(path)


def check_plot(path: Path) -> None:
    """Raise, before any work, if a plot cannot be drawn or written."""
    check_file(path, "A plot", _SUFFIXES)
    if path.exists() and (path.is_dir() or not os.access(path, os.W_OK)):
        raise ArgumentError(f"{str(path)!r} cannot be written.", hint="Choose another place for the plot.")
    if find_spec("matplotlib") is None:
        raise ExecutionError("A plot needs matplotlib.", hint=f"Install it with {install('matplotlib')}.")


@contextlib.contextmanager
def picture(
    path: Path, size: tuple[float, float], title: str, about: str, details: str = "", **options: Any
) -> Iterator[Any]:
    """A figure with three lines at its top, each smaller than the one before, which is written when the block ends.

    The size is in inches; the suffix of the path chooses the format. Whatever a `matplotlibrc` of the current folder asks
    for, such as LaTeX, the figure has the style of the plots.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from onnx_convgrad.base.drafts import draft_of

    mpl.rcdefaults()
    mpl.rcParams.update(_STYLE)
    figure = Figure(figsize=size, **options)
    width, height = size
    lines = ((0.36, title, 15, INK, "bold"), (0.64, about, 10.5, INK, "normal"), (0.87, details, 7.5, FAINT, "normal"))
    for down, text, letters, color, weight in lines:
        figure.text(0.2 / width, 1 - down / height, no_formula(text), size=letters, color=color, weight=weight)
    yield figure
    with draft_of(path) as draft:
        figure.savefig(draft)


def panels(
    figure: Any, count: int = 1, *, left: float, right: float = 0.2, top: float, bottom: float, **options: Any
) -> Any:
    """A row of axes inside of margins in inches."""
    width, height = figure.get_size_inches()
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    figure.subplots_adjust(left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height)
    return axes


def no_formula(text: str) -> str:
    """Text as it is, in a figure: between dollars, matplotlib would take it for a formula."""
    return shown(text).replace("$", r"\$")
