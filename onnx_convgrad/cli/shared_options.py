"""Options that several commands have. One name has one meaning: a text here, or that of an argument, and details."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import own_option
from onnx_convgrad.cli.figures import check_plot
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.command_options import option
from onnx_convgrad.pipeline.options import shared

if TYPE_CHECKING:
    from onnx_convgrad.evaluation.predictor import Predictor
    from onnx_convgrad.frontend.metadata import Preprocessing
    from onnx_convgrad.programs.manifest import Manifest


DATA = (
    "Data: images, a folder of images, or of one folder of images per class, .npz, [NAME=]FILE.npy, or a .csv or .tsv "
    "with the columns image and text. Repeatable."
)
LABELS = "A file with one on each line, or a JSON list. [default: the model's or the data's]"


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


def data_option(detail: str = "") -> Any:
    """`--data`, files with samples; `detail` says more of them."""
    return own_option("--data [NAME=]PATH", f"{DATA} {detail}".rstrip())


def provider_option(use: str) -> Any:
    """`--provider`, one execution provider; `use` says what it is for."""
    return own_option("--provider NAME", f"Execution provider: {use}")


FILE_STATES = "[default: those of the file]"
PART_LENGTH = "Data are then sequences `[sequences, time, ...]`, or one `[time]`. [default: no parts]"
_STATES, _LENGTH, _PAST = (
    "frontend.load:load(states)",
    "data.sequences:Sequences(length)",
    "data.sequences:Sequences(past)",
)
_PREPROCESSING, _PREDICT = "frontend.metadata:Preprocessing", "evaluation.predict:predict"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options that say how images become inputs; what is not given comes from the metadata of the model's file."""

    image_size: tuple[int, int] | None = option(
        "HxW", of=f"{_PREPROCESSING}(size)", text="[default: the model's]", parse=text.image_size
    )
    resize: int | None = option(of=_PREPROCESSING)
    mean: Sequence[float] | None = option("R,G,B", of=_PREPROCESSING, parse=text.mean)
    std: Sequence[float] | None = option("R,G,B", of=_PREPROCESSING, parse=text.std)
    preprocessing: str | None = option(of=_PREDICT, text="[default: the model's]")
    scale: float | None = option(of=_PREPROCESSING, text="[default: 1/255]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(ImageOptions):
    """Options of `predict` and `evaluate`; what is not given comes from the metadata of the model's file."""

    labels: str | None = option("FILE", of=_PREDICT, text=LABELS)
    of: str | None = option(of=f"{_PREDICT}(output)")
    task: str | None = option(of=_PREDICT)
    batch_size: int | None = option(of=_PREDICT, text="[default: the model's, or 32]")
    input_values: Mapping[str, Any] | None = shared("input_values")
    states: Mapping[str, str] | None = option("INPUT=OUTPUT...", of=_STATES, text=FILE_STATES, parse=text.states)
    part_length: int | Mapping[str, int] | None = option(
        "[ARRAY=]INT...", of=_LENGTH, text=PART_LENGTH, parse=text.part_length
    )
    part_past: int | Mapping[str, int] | None = option("[ARRAY=]INT...", of=_PAST, parse=text.part_past)
    providers: Sequence[str] | None = option("NAMES...", of="training.trainer:Trainer", parse=text.names)
    threads: int | None = option(of="runtime.session_options:SessionOptions", text="[default: the cores]")


def in_parts(source: Any, length: int | Mapping[str, int] | None, past: int | Mapping[str, int] | None) -> Any:
    """Data in parts of this length; data as they are if there is none.

    Raises:
        ArgumentError: The data are not arrays, or there is a past without a length.
    """
    from onnx_convgrad.data.datasets import Arrays
    from onnx_convgrad.data.sequences import Sequences

    if length is None:
        if past is not None:
            raise ArgumentError("--part-past is for --part-length.", hint="Give both, or neither.")
        return source
    if not isinstance(source, Arrays):
        raise ArgumentError("--part-length is for arrays.", hint="Leave it out.")
    arrays = {name: array[None] if array.ndim == 1 else array for name, array in source.arrays.items()}
    return Sequences(arrays, length, past=past or 0)


def check_outputs(data: Iterable[str], *outputs: Path | None, plot: Path | None = None) -> None:
    """Refuse, before any work, a plot that cannot be drawn, and an output that is a file of the data."""
    if plot is not None:
        check_plot(plot)
    files = [path for entry in data for path in (entry, entry.partition("=")[2]) if path and os.path.exists(path)]  # noqa: PTH110 - Path.exists refuses long text
    for output in (*outputs, plot):
        if output is not None and output.exists() and any(output.samefile(path) for path in files):
            raise ArgumentError(
                f"The output {str(output)!r} is a file of the data.", hint="Choose another name with -o."
            )


def opened(model: str, options: DataOptions, *, loss: bool = False) -> Predictor:
    """Open a model with the labels and the preprocessing of the options, or else its own."""
    from onnx_convgrad.evaluation.predict import described
    from onnx_convgrad.evaluation.predictor import open_model, reads_text
    from onnx_convgrad.training.run_folder import read_labels

    announce("opening the model")
    predictor = open_model(
        model,
        loss=loss,
        input_values=options.input_values,
        states=options.states,
        providers=list(options.providers or ()) or None,
        options={"threads": options.threads} if options.threads else None,
    )
    labels = read_labels(Path(options.labels)) if options.labels else None
    how = preprocessing_of(
        predictor.manifest, options, lambda: reads_text(predictor, predictor.output(options.of), options.task)
    )
    return described(predictor, labels, how)


def preprocessing_of(
    manifest: Manifest, options: ImageOptions, reads_text: Callable[[], bool] = lambda: False
) -> Preprocessing | None:
    """The preprocessing with the given options in place of the manifest's; `None` if there are none.

    If `reads_text` says that images show text, they keep their shape, unless the model's file says more.
    """
    import numpy as np

    from onnx_convgrad.data.image_set import check_size, given_preprocessing, overridden, wanted_preprocessing
    from onnx_convgrad.data.pictures import ImageReader, image_port

    _, named = wanted_preprocessing(options.preprocessing)
    given = named | given_preprocessing(options.image_size, options.resize, options.mean, options.std, options.scale)
    if not given:
        return None
    known, port = manifest.preprocessing, image_port(manifest.data)
    if known is None and reads_text():
        given["fit"] = "pad"
    wanted = overridden(known, given)
    check_size(port, ImageReader.of(port, wanted).preprocessing, wanted.size)
    settled = known is not None or np.dtype(port.dtype).kind in "iu" or {"mean", "std", "scale"}.intersection(given)
    return wanted if settled else None  # a size alone does not say how pixels become numbers


def named_inputs(entries: Sequence[str]) -> dict[str, str]:
    """Input -> array, of the entries `INPUT=ARRAY` of --map."""
    return text.pairs("--map", entries, "x=images")
