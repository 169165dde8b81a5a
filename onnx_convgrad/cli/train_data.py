"""Make the data of a training run from its options: data sets, sizes of inputs, batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.paths import as_path
from onnx_convgrad.cli.shared_options import in_parts, named_inputs
from onnx_convgrad.cli.train_config import Config, share_of
from onnx_convgrad.data.batches import BATCH_SIZE, Loader
from onnx_convgrad.data.datasets import Arrays, Dataset, named_arrays
from onnx_convgrad.data.image_set import given_preprocessing, overridden, wanted_preprocessing
from onnx_convgrad.data.images import ImageFolder, images_directly_in, is_image_folder
from onnx_convgrad.data.mixing import MIXINGS
from onnx_convgrad.data.pictures import layout_of
from onnx_convgrad.data.teacher import Teacher
from onnx_convgrad.data.texts import TextImages, is_table
from onnx_convgrad.errors import ArgumentError, ConvGradError
from onnx_convgrad.frontend.bound_inputs import known_values
from onnx_convgrad.frontend.files import read
from onnx_convgrad.frontend.load import load
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.training.run_folder import read_labels


def datasets(config: Config) -> tuple[Dataset, Dataset | None]:
    """Read the data to train on and the data to evaluate on."""
    if not config.data:
        raise ArgumentError("There is no data.", hint="Give --data: an .npz file, .npy files, or a folder of images.")
    train = _dataset(config, config.data)
    if not config.validation:
        return train, None
    share = share_of(config.validation[0]) if len(config.validation) == 1 else None
    if share is not None:
        return train.split(share, config.seed)
    return train, _dataset(config, config.validation, train.classes or None)


def taught(config: Config, train: Dataset, held: Dataset | None) -> tuple[Dataset, Dataset | None]:
    """Add the predictions of `--teacher` to the data."""
    if config.teacher is None:
        return train, held
    settings: dict[str, Any] = {"providers": list(config.providers) or None, "names": named_inputs(config.map)}
    settings["options"] = {"threads": config.threads} if config.threads else None
    inputs = [value.name or "" for value in read(config.teacher).graph.inputs] if config.input_value else []
    values = known_values(text.input_values(config.input_value), inputs)
    teacher = Teacher(load(config.teacher, input_values=values) if values else config.teacher, **settings)
    return teacher.teaching(train), None if held is None else teacher.teaching(held)


def _dataset(config: Config, entries: tuple[str, ...], classes: tuple[str, ...] | None = None) -> Dataset:
    """Read a folder of images, or the arrays of all files; `NAME=PATH` names the array of an `.npy` file."""
    labels = classes or (read_labels(Path(config.labels)) if config.labels else None)
    only = as_path(entries[0], "--data") if len(entries) == 1 else None
    if only is not None and (is_table(only) or ("ctc" in config.loss and only.is_dir() and images_directly_in(only))):
        if config.augment:
            raise ArgumentError("--augment is for images of classes, not of texts.", hint="Leave it out.")
        return TextImages(only, labels=classes, **_preprocessing(config))
    if only is not None and is_image_folder(only):
        how = _preprocessing(config)
        return ImageFolder(only, resize=config.resize, classes=labels, augment=config.augment, **how)
    other = [name for name in config.augment if name not in MIXINGS]
    if other:
        raise ArgumentError(
            f"--augment {other[0]} changes images in folders, and the data are arrays.",
            hint=f"Use {' or '.join(MIXINGS)}, or leave it out.",
        )
    arrays = Arrays(named_arrays(entries), augment=config.augment)
    length = text.part_length(config.part_length) if config.part_length else None
    return in_parts(arrays, length, text.part_past(config.part_past) if config.part_past else None)  # type: ignore[no-any-return]


def sized(config: Config, model: ir.Model) -> Config:
    """Add input shapes for `--image-size`, and for batches of several samples, where the model's file fixes others.

    `--input-shape` wins. A number of samples is only freed if every output then has as many.
    """
    size, given = _image_size(config), text.input_shapes(config.input_shape)
    shapes: dict[str, list[int | str | None]] = {}
    for value in model.graph.inputs:
        port = Port.from_value(value)
        if value.is_initializer() or port.name in given or port.shape is None or len(port.shape) < 2:
            continue
        dims = list(port.shape)
        if size is not None and len(dims) == 4:
            first = 2 if layout_of(port)[0] == "NCHW" else 1
            dims[first : first + 2] = [s if isinstance(d, int) else d for d, s in zip(dims[first:], size, strict=False)]
        if dims != list(port.shape) or isinstance(dims[0], int):
            shapes[port.name] = dims
    free = {name: [_SAMPLES, *dims[1:]] for name, dims in shapes.items()}
    wanted = {dims[0] for dims in shapes.values()}
    other = wanted != {config.batch_size} and (config.batch_size is not None or wanted == {1})
    if shapes and other and _takes_batches(model, free):
        shapes = free
    declared = {v.name: list(Port.from_value(v).shape or ()) for v in model.graph.inputs}
    written = [f"{n}:{','.join(map(_dim, dims))}" for n, dims in shapes.items() if dims != declared[n]]
    return replace(config, input_shape=(*config.input_shape, *written)) if written else config


_SAMPLES = "N"
"""Name of a free number of samples."""


def _takes_batches(model: ir.Model, shapes: Mapping[str, list[int | str | None]]) -> bool:
    """Whether every output has a free number of samples if the inputs have one."""
    try:
        outputs = load(model, input_shapes=shapes).canonical.graph.outputs
    except ConvGradError:
        return False
    firsts = [v.shape[0] if v.shape is not None and len(v.shape) else None for v in outputs]
    return all(isinstance(first, ir.SymbolicDim) and first.value == _SAMPLES for first in firsts)


def _dim(dim: int | str | None) -> str:
    return str(dim) if isinstance(dim, int) or (dim and dim.isidentifier()) else "?"


def _image_size(config: Config) -> tuple[int, int] | None:
    return text.image_size(",".join(config.image_size)) if config.image_size else None


def _preprocessing(config: Config) -> dict[str, Any]:
    mean, std = config.mean or None, config.std or None
    return {"size": _image_size(config), "preprocessing": config.preprocessing, "mean": mean, "std": std}


def batches(config: Config, model: ir.Model, samples: int) -> tuple[int, int]:
    """Return the batch size (the given one, or that of the model's inputs, or the default) and the batches per epoch."""
    given, bound = text.input_shapes(config.input_shape), text.input_values(config.input_value)
    ports = [Port.from_value(v) for v in model.graph.inputs if v.name not in bound and not v.is_initializer()]
    shapes = [given.get(port.name, port.shape) or (None,) for port in ports]
    fixed = next((shape[0] for shape in shapes if isinstance(shape[0], int)), None)
    size = config.batch_size or fixed or BATCH_SIZE
    return size, samples // size if fixed else -(-samples // size)


def loaders(config: Config, manifest: Manifest, train: Dataset, held: Dataset | None) -> tuple[Loader, Loader | None]:
    """Make the loaders of the batches."""
    if not isinstance(train.source, (ImageFolder, TextImages)):  # of arrays of pixels
        given = given_preprocessing(mean=config.mean or None, std=config.std or None)
        options = wanted_preprocessing(config.preprocessing)[1] | given
        if options:
            manifest = manifest.described(manifest.labels, overridden(manifest.preprocessing, options))
    names = {} if config.teacher else named_inputs(config.map)
    common: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed, "names": names}
    loader = Loader(train, manifest, shuffle=config.shuffle, augment=True, **common)
    return loader, None if held is None else Loader(held, manifest, shuffle=False, **common)
