"""The command `attribute`: explain predictions for images (tool: may change in a minor version)."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.figures import FAINT, INK, check_file, no_formula, picture
from onnx_convgrad.cli.shared_options import DataOptions, check_outputs, opened, out_option
from onnx_convgrad.cli.tables import Output, Table, shortened
from onnx_convgrad.errors import ArgumentError, shown
from onnx_convgrad.pipeline.command_options import option, written

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from onnx_convgrad.data.files import ImageFiles

METHODS = {
    "grad_cam": "Grad-CAM",
    "grad_cam_plus_plus": "Grad-CAM++",
    "saliency": "Saliency",
    "smooth_grad": "SmoothGrad",
    "integrated_gradients": "Integrated gradients",
    "input_x_gradient": "Input x gradient",
    "guided_backprop": "Guided backpropagation",
    "lrp": "Layer-wise relevance",
    "occlusion": "Occlusion",
}
"""Name of a method -> its title."""

_SUFFIXES = (".png", ".svg", ".pdf", ".npz")

_MOST = 24
"""Most images in one picture."""


_PATHS = "attribution.paths"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeOptions(DataOptions):
    """Options of `attribute`: how images become inputs, and those of single methods."""

    layer: str | None = option(of="attribution.cam:grad_cam", text="[default: the last convolution]")
    samples: int | None = option("--noisy-samples INT", of=f"{_PATHS}:smooth_grad")
    noise: float | None = option(of=f"{_PATHS}:smooth_grad")
    steps: int | None = option(of=f"{_PATHS}:integrated_gradients")
    window: int | None = option(of=f"{_PATHS}:occlusion")
    stride: int | None = option(of=f"{_PATHS}:occlusion")
    stabilizer: float | None = option(of="attribution.gradients:lrp")
    gamma: float | None = option(of="attribution.gradients:lrp")


@dataclass(frozen=True, slots=True)
class Attribution:
    """The explanation of the prediction for one image.

    Attributes:
        image: Name of the file.
        picture: Its pixels, uint8 `[H, W]` or `[H, W, 3]`.
        label: The explained class: its name, or its number.
        number: The number of the explained class.
        probability: Its probability; `None` if the outputs are not probabilities.
        values: The attribution, of the shape of the input, or `[H, W]`.
        places: The attribution `[H, W]`, summed over the channels.
    """

    image: str
    picture: np.ndarray
    label: str
    number: int
    probability: float | None
    values: np.ndarray
    places: np.ndarray

    @property
    def signed(self) -> bool:
        """Whether places speak against the class, too."""
        return bool((self.places < 0).any())


@command(leave=("task", "batch_size"))
def attribute(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Images, or a folder of images.")],
    *,
    model: Annotated[str, own_option("MODEL", "An ONNX file that classifies images.")],
    method: Annotated[str, own_option("NAME", f"Method: {', '.join(METHODS)}.")] = "grad_cam",
    label: Annotated[str | None, own_option("CLASS", "Class to explain, by name or number. [default: the top]")] = None,
    output_file: Annotated[
        Path | None,
        out_option("a picture (.png, .svg, .pdf), or arrays (.npz). [default: <image>.<method>.png in this folder]"),
    ] = None,
    export: Annotated[Path | None, own_option("FILE", "Write the model that computes the explanation.")] = None,
    options: AttributeOptions,
    out: Output,
) -> None:
    """Draw saliency maps: what a classifier sees in images.

    \b
    Example:
      onnx-convgrad attribute cat.jpg --model model.onnx -o map.png
      onnx-convgrad attribute cat.jpg --model model.onnx --method integrated_gradients --label tabby
    """
    from onnx_convgrad.data.files import ImageFiles, read_data
    from onnx_convgrad.data.images import ImageFolder
    from onnx_convgrad.frontend.files import check_destination, write

    name = _method(method)
    own = _own(name, options)
    path = output_file or Path(f"{Path(images[0]).stem}.{name}.png")
    drawn = path.suffix.lower() != ".npz"
    check_file(path, "An explanation", _SUFFIXES)
    check_outputs(images, path, export, plot=path if drawn else None)
    if export is not None:
        check_destination(export, Path(model))
    with out.stages("reading the images"):
        source = read_data(images)
        if isinstance(source, ImageFolder):
            raise ArgumentError(
                f"{images[0]!r} has no images of its own, but a folder for each class.",
                hint=f"Name the images, {images[0].rstrip('/')}/*/*, or one folder of them.",
            )
        if not isinstance(source, ImageFiles):
            raise ArgumentError("The data are not images.", hint="Name image files, or a folder of them.")
        if len(source) > _MOST and drawn:
            raise ArgumentError(
                f"{len(source)} images do not fit into one picture.", hint=f"Give {_MOST}, or -o FILE.npz."
            )
        predictor = opened(model, options)
        announce("building the explanation")
        explained = _explained(name, model, _number(label, predictor.manifest.labels), options.of, own)
        if export is not None:
            write(explained, export, alone=True)
        announce("explaining")
        found = _attributions(explained, predictor, source, options)
    _write(found, path, f"{METHODS[name]} of {Path(model).name}")
    rows = [{"image": a.image, "label": a.label, "class": a.number, "probability": a.probability} for a in found]
    out.print_json({"method": name, "file": str(path), "images": rows})
    rows_of_text = [[a.image, a.label, "" if a.probability is None else f"{a.probability:.4f}"] for a in found]
    out.table(Table(["image", "explained class", "probability"], rows_of_text, {2}))
    out.line()
    out.line(f"The explanation by {name} is in {path}.")
    if export is not None:
        out.line(f"The model that computes it is {export}.")


def _method(name: str) -> str:
    """The method of this name; underscores may be missing or dashes."""
    plain = {re.sub("[-_]", "", m): m for m in METHODS}
    found = plain.get(re.sub("[-_]", "", name.lower().replace("++", "plusplus")), name)
    check_names([found], list(METHODS), "method")
    return found


def _own(method: str, options: AttributeOptions) -> dict[str, Any]:
    """The options of the method among those given; raises `ArgumentError` for one of another method."""
    from onnx_convgrad import attribution

    taken = inspect.signature(getattr(attribution, method)).parameters
    own = {f: getattr(options, f.name) for f in fields(options) if f.name in AttributeOptions.__annotations__}
    given = {f: value for f, value in own.items() if value is not None}
    for f in given:
        if f.name not in taken:
            fitting = [m for m in METHODS if f.name in inspect.signature(getattr(attribution, m)).parameters]
            raise ArgumentError(
                f"{written(f)[0].names[-1]} is for the method {' or '.join(fitting)}, not for {method}.",
                hint="Leave it out, or choose that --method.",
            )
    return {f.name: value for f, value in given.items()}


def _number(label: str | None, labels: tuple[str, ...] | None) -> int | None:
    """The number of a class that is given by its name or number."""
    if label is None:
        return None
    if labels and label in labels:
        return labels.index(label)
    if label.isdecimal():
        return int(label)
    if not labels:
        raise ArgumentError(f"The model does not name its classes, so {label!r} is not known.", hint="Give a number.")
    check_names([label], labels, "class")
    return None


def _explained(method: str, model: str, label: int | None, of: str | None, own: dict[str, Any]) -> ir.Model:
    """The model with the outputs of the explanation."""
    from onnx_convgrad import attribution
    from onnx_convgrad.frontend.files import read
    from onnx_convgrad.training.run_folder import trained_file

    path = Path(model)
    file = trained_file(path) if path.is_dir() else path
    if file is None:
        raise ArgumentError(f"The run {model!r} has only checkpoints.", hint="Name an ONNX file.")
    result: ir.Model = getattr(attribution, method)(read(file), label=label, of=of, **own)
    return result


def _attributions(
    explained: ir.Model, predictor: Any, source: ImageFiles, options: AttributeOptions
) -> list[Attribution]:
    """Run the explanation, image by image."""
    import numpy as np

    from onnx_convgrad.data.pictures import image_port
    from onnx_convgrad.evaluation.predict import predictions
    from onnx_convgrad.runtime import session

    data = source.bound(predictor.manifest)
    reader, port = data.reader, image_port(predictor.manifest.data)
    assert reader is not None
    found = predictions(predictor, source, output=options.of)
    live = session(explained, providers=list(options.providers or ()) or None)
    batch = port.shape[0] if port.shape and isinstance(port.shape[0], int) else 1
    results = []
    for i, file in enumerate(source.files):
        image = reader.cropped(reader.opened(file))
        feed = np.repeat(reader.numbers(image)[None], batch, axis=0)
        values, number = live.run(["attribution", "explained_label"], {port.name: feed})
        chosen = int(number[0])
        name = found.labels[chosen] if chosen < len(found.labels) else str(chosen)
        certain = found.task != "numbers" and chosen < found.values.shape[1]
        probability = float(found.values[i, chosen]) if certain else None
        places = values[0] if values.ndim == 3 else values[0].sum(0 if reader.preprocessing.layout == "NCHW" else 2)
        results.append(Attribution(str(file), np.asarray(image), name, chosen, probability, values[0], places))
    return results


def _write(found: list[Attribution], path: Path, title: str) -> None:
    import numpy as np

    from onnx_convgrad.base.drafts import write_arrays

    if path.suffix.lower() != ".npz":
        _plot(found, path, title)
        return
    arrays = {f"attribution_{i}": a.values for i, a in enumerate(found)}
    if len({a.values.shape for a in found}) == 1:
        arrays = {"attribution": np.stack([a.values for a in found])}
    names = {"label": np.array([a.number for a in found]), "image": np.array([a.image for a in found])}
    write_arrays(path, {**arrays, **names})


# -- the picture -------------------------------------------------------------------------------------------------------

_SIDE, _GAP, _TOP, _TEXT = 2.6, 0.18, 0.75, 0.34
"""Inches: the width of a panel, between panels, above the first row, and of the text above each row."""

_ACROSS = 2
"""Images in a row, each with its map."""

_TAIL = 99.5
"""Percentile of the absolute values that gets the strongest color: single large numbers would hide all others."""

_UPRIGHT = 1.5
"""The most height of a panel, relative to its width."""

_LETTERS = 44


def _plot(found: list[Attribution], path: Path, title: str) -> None:
    """Draw images and maps; the suffix of the path chooses the format.

    A map of places, which has no channels, is laid over the gray image. Signed maps are red where they speak for the class
    and blue where they speak against it.
    """
    across = min(len(found), _ACROSS)
    rows = -(-len(found) // across)
    width = across * 2 * (_SIDE + _GAP) + 0.4
    high = _SIDE * min(max(one.picture.shape[0] / one.picture.shape[1] for one in found), _UPRIGHT)
    height = _TOP + rows * (high + _TEXT + _GAP)
    signed = any(one.signed for one in found)
    meaning = "red speaks for the class, blue against it" if signed else "bright places speak for the class"
    with picture(path, (width, height), title, meaning, dpi=130) as figure:
        for i, one in enumerate(found):
            bottom = height - _TOP - (i // across) * (high + _TEXT + _GAP) - _TEXT - high
            lefts = [0.2 + (i % across * 2 + k) * (_SIDE + _GAP) for k in range(2)]
            _draw([figure.add_axes((x / width, bottom / height, _SIDE / width, high / height)) for x in lefts], one)
            chance = "" if one.probability is None else f", {one.probability:.1%}"
            texts = shortened(shown(Path(one.image).name), _LETTERS), shortened(shown(one.label), _LETTERS) + chance
            for x, text, style in zip(lefts, texts, ({"color": FAINT}, {"color": INK, "weight": "bold"}), strict=True):
                figure.text(x / width, (bottom + high + 0.08) / height, no_formula(text), size=8, **style)


def _draw(panels: list[Any], one: Attribution) -> None:
    """Draw an image and its map."""
    import numpy as np

    values, picture, overlaid = one.places, one.picture, one.values.ndim == 2
    gray = {"cmap": "gray", "vmin": 0, "vmax": 255}
    panels[0].imshow(picture, interpolation="nearest", **(gray if picture.ndim == 2 else {}))
    top = float(np.percentile(np.abs(values), _TAIL)) or float(np.abs(values).max()) or 1.0
    if overlaid:
        panels[1].imshow(picture if picture.ndim == 2 else picture.mean(-1), interpolation="nearest", **gray)
    colors = {"cmap": "RdBu_r", "vmin": -top} if one.signed else {"cmap": "inferno", "vmin": 0}
    look = {"alpha": 0.6, "interpolation": "bilinear"} if overlaid else {"alpha": 1.0, "interpolation": "nearest"}
    extent = (-0.5, picture.shape[1] - 0.5, picture.shape[0] - 0.5, -0.5)
    panels[1].imshow(values, vmax=top, extent=extent, **colors, **look)
    for panel in panels:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set(visible=True, color="#c9d1d9")
