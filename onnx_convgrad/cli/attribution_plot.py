"""Plot explanations of images: each image beside its map."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.cli.figures import FAINT, INK, no_formula, picture
from onnx_convgrad.cli.tables import shortened
from onnx_convgrad.errors import shown

_SIDE, _GAP, _TOP, _TEXT = 2.6, 0.18, 0.75, 0.34
"""Inches: the width of a panel, between panels, above the first row, and of the text above each row."""

_ACROSS = 2
"""Images in a row, each with its map."""

_TAIL = 99.5
"""Percentile of the absolute values that gets the strongest color: single large numbers would hide all others."""

_UPRIGHT = 1.5
"""The most height of a panel, relative to its width."""

_LETTERS = 44


@dataclass(frozen=True, slots=True)
class Attribution:
    """The explanation of the prediction for one image.

    Attributes:
        name: The image.
        picture: Its pixels, uint8 `[H, W]` or `[H, W, 3]`.
        label: The explained class: its name, or its number.
        number: The number of the explained class.
        probability: Its probability; `None` if the outputs are not probabilities.
        values: The attribution, of the shape of the input, or `[H, W]`.
        channels: The axis of channels in `values`; `None` without one.
    """

    name: str
    picture: np.ndarray
    label: str
    number: int
    probability: float | None
    values: np.ndarray
    channels: int | None

    def by_place(self) -> np.ndarray:
        """The attribution `[H, W]`, summed over the channels."""
        result: np.ndarray = self.values if self.channels is None else self.values.sum(self.channels)
        return result


def plot(found: list[Attribution], path: Path, title: str) -> None:
    """Draw images and maps; the suffix of the path chooses the format.

    A map of places, which has no channels, is laid over the gray image. Signed maps are red where they speak for the class
    and blue where they speak against it.
    """
    across = min(len(found), _ACROSS)
    rows = -(-len(found) // across)
    width = across * 2 * (_SIDE + _GAP) + 0.4
    high = _SIDE * min(max(one.picture.shape[0] / one.picture.shape[1] for one in found), _UPRIGHT)
    height = _TOP + rows * (high + _TEXT + _GAP)
    signed = any(_signed(one) for one in found)
    meaning = "red speaks for the class, blue against it" if signed else "bright places speak for the class"
    with picture(path, (width, height), title, meaning, dpi=130) as figure:
        for i, one in enumerate(found):
            bottom = height - _TOP - (i // across) * (high + _TEXT + _GAP) - _TEXT - high
            lefts = [0.2 + (i % across * 2 + k) * (_SIDE + _GAP) for k in range(2)]
            _draw([figure.add_axes((x / width, bottom / height, _SIDE / width, high / height)) for x in lefts], one)
            chance = "" if one.probability is None else f", {one.probability:.1%}"
            texts = shortened(shown(Path(one.name).name), _LETTERS), shortened(shown(one.label), _LETTERS) + chance
            for x, text, style in zip(lefts, texts, ({"color": FAINT}, {"color": INK, "weight": "bold"}), strict=True):
                figure.text(x / width, (bottom + high + 0.08) / height, no_formula(text), size=8, **style)


def _signed(one: Attribution) -> bool:
    return bool((one.by_place() < 0).any())


def _draw(panels: list[Any], one: Attribution) -> None:
    """Draw an image and its map."""
    values, picture = one.by_place(), one.picture
    gray = {"cmap": "gray", "vmin": 0, "vmax": 255}
    panels[0].imshow(picture, interpolation="nearest", **(gray if picture.ndim == 2 else {}))
    top = float(np.percentile(np.abs(values), _TAIL)) or float(np.abs(values).max()) or 1.0
    if one.channels is None:
        panels[1].imshow(picture if picture.ndim == 2 else picture.mean(-1), interpolation="nearest", **gray)
    signed = _signed(one)
    panels[1].imshow(
        values,
        cmap="RdBu_r" if signed else "inferno",
        vmin=-top if signed else 0,
        vmax=top,
        alpha=0.6 if one.channels is None else 1.0,
        interpolation="bilinear" if one.channels is None else "nearest",
        extent=(-0.5, picture.shape[1] - 0.5, picture.shape[0] - 0.5, -0.5),
    )
    for panel in panels:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set(visible=True, color="#c9d1d9")
