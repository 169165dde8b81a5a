"""The summary of a run before its first step: data, odd things about them, trained layers, loss and optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from onnx_convgrad.base.notebook import Shown
from onnx_convgrad.data.batches import Loader
from onnx_convgrad.data.datasets import Arrays, Part
from onnx_convgrad.data.images import ImageFolder
from onnx_convgrad.data.inputs import STATE_ROWS
from onnx_convgrad.data.pictures import layout_of
from onnx_convgrad.errors import first_few, shown
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.frontend.roles import parameters
from onnx_convgrad.programs.optim.schedules import describe_schedule
from onnx_convgrad.training.protocols import TrainerLike

_BATCHES = 2
"""Batches whose values are looked at."""

_SHOWN, _LAYERS = 6, 12
"""Most classes and most layers that are listed one by one."""

_BEYOND = 2.0
"""Numbers beyond this many times the range that images have are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A data set.

    Attributes:
        samples: Their number.
        classes: Name or number of each class -> number of its samples, if that is known without reading the data.
        inputs: Input -> dtype, shape of a batch, and smallest and largest value in the first batches.
        warnings: Sentences about odd things in it.
    """

    samples: int
    classes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, tuple[int, ...], float, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Shown):
    """The plan of a run before its first step; `str` gives it as text.

    Attributes:
        train: The data to train on, if given.
        validation: The data to evaluate on, if given.
        layers: Layer -> numbers that are trained, and numbers that are frozen.
        losses: Name, output and weight of each term of the loss.
        optimizer: Name and options.
        schedule: Name and options.
        steps: Updates per epoch and in total, if known.
        preprocessing: The way from images to numbers, as text.
    """

    train: Data | None
    validation: Data | None
    layers: Mapping[str, tuple[int, int]]
    losses: tuple[Mapping[str, Any], ...]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]
    steps: tuple[int, int] | None
    preprocessing: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about odd things in the data."""
        return tuple(text for data in (self.train, self.validation) if data for text in data.warnings)

    def lines(self) -> list[tuple[str, str]]:
        """Headings and texts."""
        found = [(name, text) for name in ("train", "validation") for text in _data_lines(getattr(self, name))]
        if self.preprocessing:
            found.append(("images", self.preprocessing))
        for loss in self.losses:
            moved: Mapping[str, Any] = loss.get("schedule", {})
            weight = "" if loss["weight"] == 1 else f"{loss['weight']:g} times "
            if moved:
                weight = f"{moved['name']}({_options({k: v for k, v in moved.items() if k != 'name'})}) times "
            reads = loss.get("reads") or loss["output"]
            read = "" if reads == loss["output"] else f", reading {reads!r}"
            found.append(("loss", f"{weight}{loss['loss'] or 'the value'} of {loss['output']!r}{read}"))
        shown = {k: v for k, v in self.optimizer.items() if k not in ("name", "schedule", "groups") and v is not None}
        found.append(("optimizer", f"{self.optimizer['name']}({_options(shown)})"))
        rest = {k: v for k, v in self.schedule.items() if k != "name"}
        found.append(("schedule", f"{self.schedule['name']}({_options(rest)})"))
        if self.steps is not None:
            found.append(("steps", f"{self.steps[0]:,} per epoch, {self.steps[1]:,} in total"))
        trained, frozen = (sum(counts[i] for counts in self.layers.values()) for i in (0, 1))
        found.append(("trained", f"{trained:,} numbers; {frozen:,} are frozen"))
        return found

    def rows(self) -> list[tuple[str, str, str]]:
        """Layer, trained and frozen numbers."""
        return [(layer, f"{trained:,}", f"{frozen:,}") for layer, (trained, frozen) in self.layers.items()]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        texts = [f"{name:<10}  {text}" for name, text in self.lines()]
        width = max((len(layer) for layer in self.layers), default=0)
        texts += [f"  {layer:<{width}}  {trained} trained, {frozen} frozen" for layer, trained, frozen in self.rows()]
        return "\n".join(map(shown, [*texts, *(f"Warning: {text}" for text in self.warnings)]))


def summarize(
    trainer: TrainerLike, train: object, validation: object, epochs: int | None, accumulate: int = 1
) -> Summary:
    """Summarize a run; data that are not a `Loader` are left out, since reading them may use them up."""
    m, steps = trainer.manifest, None
    loader = train if isinstance(train, Loader) else None
    if loader is not None:
        each = -(-len(loader) // accumulate)
        steps = each, each * (1 if epochs is None else epochs)
    seen = None if loader is None else _data(loader)
    held = _data(validation, seen) if isinstance(validation, Loader) else None
    return Summary(
        train=seen,
        validation=held,
        layers=_layers(trainer),
        losses=m.losses,
        optimizer=m.optimizer,
        schedule=describe_schedule(trainer.schedule),
        steps=steps,
        preprocessing=_images(loader.inputs.preprocessing) if loader is not None else "",
    )


def _data(loader: Loader, trained: Data | None = None) -> Data:
    """Describe a data set; `trained` are those to train on, if these are not they."""
    classes = _classes(loader)
    ranges: dict[str, tuple[str, tuple[int, ...], float, float]] = {}
    for batch in islice(loader.epoch_iterator(0), _BATCHES):
        for name, array in batch.items():
            if name != STATE_ROWS and array.size and array.dtype.kind in "iuf":
                kind, shape, low, high = ranges.get(name, (str(array.dtype), array.shape, math.inf, -math.inf))
                ranges[name] = kind, shape, min(low, float(array.min())), max(high, float(array.max()))
    warnings = [*_odd_classes(classes, trained), *_odd_values(loader, ranges)]
    for count, _ in loader.manifest.classes.values() if trained is None and loader.dataset.classes else ():
        if count > len(loader.dataset.classes):
            warnings.append(
                f"The model has {count} classes, the data {len(loader.dataset.classes)}: the others become improbable."
                f" Give the model a head of its own (transforms.replace_head, --classes {len(loader.dataset.classes)})."
            )
    if isinstance(loader.dataset, ImageFolder) and loader.dataset.empty and trained is None:
        warnings.append(f"These folders hold no images and are not classes: {_few(loader.dataset.empty)}.")
    return Data(samples=len(loader.dataset), classes=classes, inputs=ranges, warnings=tuple(warnings))


def _classes(loader: Loader) -> dict[str, int]:
    """Samples by class, where labels are known without reading the data."""
    whole, names = loader.dataset.source, loader.dataset.classes
    if isinstance(whole, ImageFolder):
        labels, count = np.array([label for _, label in whole.files]), len(names)
    elif isinstance(whole, Arrays) and len(loader.manifest.classes) == 1:
        ((port, (count, _)),) = loader.manifest.classes.items()
        found = whole.arrays.get(loader.inputs.match(whole.names)[port])
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
            return {}
        labels = np.asarray(found)
    else:
        return {}
    if isinstance(loader.dataset, Part):
        labels = labels[loader.dataset.rows]
    counts = np.bincount(labels[(labels >= 0) & (labels < count)].reshape(-1), minlength=count)
    return {names[i] if i < len(names) else str(i): int(n) for i, n in enumerate(counts)}


def _odd_classes(classes: Mapping[str, int], trained: Data | None) -> Iterator[str]:
    missing = [name for name, count in classes.items() if not count]
    if trained is None:
        if len(classes) - len(missing) == 1:
            (only,) = set(classes) - set(missing)
            yield f"All samples are of the class {only!r}: there is nothing to tell it from, and the loss becomes 0."
        elif missing and len(missing) < len(classes):
            yield f"Nothing to train on for {_few(missing)} of {len(classes)} classes."
        return
    unseen = [name for name, count in classes.items() if count and not trained.classes.get(name)]
    if unseen:
        yield f"The validation has samples of {_few(unseen)}, of which there are none to train on."
    left = [name for name in missing if trained.classes.get(name)]
    if left:
        yield f"The validation has no samples of {_few(left)}."


def _odd_values(loader: Loader, ranges: Mapping[str, tuple[str, tuple[int, ...], float, float]]) -> Iterator[str]:
    """Compare numbers of images with those that the preprocessing makes of pixels."""
    for port in loader.manifest.data:
        if port.name not in ranges or len(port.shape or ()) != 4 or np.dtype(port.dtype).kind != "f":
            continue
        try:
            layout_of(port)
        except ValueError:  # no image
            continue
        low, high = ranges[port.name][2:]
        p = loader.inputs.preprocessing
        if p is None:
            if low >= 0 and high > _PIXELS:
                yield (
                    f"{port.name!r} has numbers from {low:g} to {high:g}, which look like pixels, although most models "
                    "take numbers of about -3 to 3. Give uint8, which is scaled, or divide by 255."
                )
            continue
        mean, std = np.asarray(p.mean), np.asarray(p.std)
        least, most = float(((0 - mean) / std).min()), float(((255 * p.scale - mean) / std).max())
        if max(abs(low), abs(high)) > _BEYOND * max(abs(least), abs(most)):
            yield (
                f"{port.name!r} has numbers from {low:.3g} to {high:.3g}; by the preprocessing of the model, images give "
                f"{least:.3g} to {most:.3g}. Give uint8, which is scaled, or scale the numbers."
            )


_PIXELS = 64


def _images(p: Preprocessing | None) -> str:
    if p is None:
        return ""
    size = "" if p.size is None else f"{p.size[0]}x{p.size[1]}, "
    scale = "1/255" if math.isclose(p.scale, 1 / 255) else f"{p.scale:g}"
    shown = (",".join(f"{number:.4g}" for number in numbers) for numbers in (p.mean, p.std))
    return f"{size}(pixel * {scale} - {next(shown)}) / {next(shown)}, {p.layout}"


def _layers(trainer: TrainerLike) -> dict[str, tuple[int, int]]:
    """Numbers of each layer that are trained and frozen; names are cut off until a screen shows all layers."""
    m = trainer.manifest
    stored = parameters(load(trainer.program.model("inference")).canonical.graph)
    sizes = {v.name: (0, v.const_value.size) for v in stored if v.name and v.const_value is not None}
    sizes |= {p.name: (math.prod(p.static_shape()), 0) for p in m.parameters}
    names = {name: name.replace("/", ".").split(".") for name in sizes}
    depth = max((len(parts) for parts in names.values()), default=1) - 1
    while True:
        layers: dict[str, tuple[int, int]] = {}
        for name, (trained, frozen) in sizes.items():
            parts = names[name]
            key = ".".join(parts[: max(1, min(depth, len(parts) - 1))])
            before = layers.get(key, (0, 0))
            layers[key] = before[0] + trained, before[1] + frozen
        if len(layers) <= _LAYERS or depth <= 1:
            return layers
        depth -= 1


# -- text --------------------------------------------------------------------------------------------------------------


def _data_lines(data: Data | None) -> Iterator[str]:
    if data is None:
        return
    counted = [name for name, count in data.classes.items() if count]
    if not data.classes:
        yield f"{data.samples:,} samples"
    elif len(counted) <= _SHOWN:
        yield f"{data.samples:,} samples of {len(counted)} classes: {', '.join(f'{n} {data.classes[n]:,}' for n in counted)}"
    else:
        counts = [data.classes[name] for name in counted]
        each = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        yield f"{data.samples:,} samples of {len(counted)} classes, {each} of each"
    for name, (dtype, shape, low, high) in data.inputs.items():
        yield f"{name}: {dtype} {'x'.join(map(str, shape))}, {low:.4g} to {high:.4g} in the first batches"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in options.items())


def _few(names: Iterable[str]) -> str:
    return first_few(list(map(repr, names)), _SHOWN)
