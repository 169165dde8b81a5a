"""The number of classes of a training run: from `--classes` or the data; the model's last layer is replaced to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import convolves
from onnx_convgrad.base.warn import warn
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.data.alphabet import Alphabet
from onnx_convgrad.data.datasets import Arrays, Dataset
from onnx_convgrad.data.inputs import USUAL_TARGETS
from onnx_convgrad.data.texts import TextImages
from onnx_convgrad.errors import ArgumentError, ConvGradError
from onnx_convgrad.frontend.metadata import labels_of
from onnx_convgrad.frontend.quantizers import is_quantizer
from onnx_convgrad.metrics.texts import frames_first
from onnx_convgrad.programs.losses.cross_entropy import ClassLoss
from onnx_convgrad.programs.manifest import Port
from onnx_convgrad.programs.terms import LOSSES
from onnx_convgrad.surgery.head import Head, find_head, with_new_head
from onnx_convgrad.training.run_folder import read_labels

Tell = Callable[[str], object]

_MANY = 10**6
"""Number of classes that no last layer has."""

_DEEP = 8
"""Fewest convolutions of a network of which it is said that it may need normalization."""


def with_default_loss(config: Config, data: Dataset, tell: Tell) -> Config:
    """The options with the loss for a folder of classes, if none was given."""
    if not config.loss and isinstance(data.source, TextImages):
        tell("The loss is ctc, as no --loss was given and the data are images with texts.")
        return replace(config, loss=("ctc",))
    if config.loss or not data.classes:
        return config
    tell("The loss is cross_entropy, as no --loss was given and the data is a folder of classes.")
    return replace(config, loss=("cross_entropy",))


def suggest_batchnorm(config: Config, model: ir.Model, tell: Tell) -> None:
    """Name `--unfold-batchnorm` for a deep convolutional network without any normalization, as exporters leave it."""
    if config.unfold_batchnorm or config.lora is not None or config.qat:
        return
    nodes = list(model.graph.all_nodes())
    count = sum(convolves(n) or n.op_type == "FusedConv" for n in nodes)
    if count >= _DEEP and not any(map(_normalizes, nodes)):
        tell(
            f"The file has {count} convolutions and no normalization: its exporter may have folded BatchNormalization "
            "into them. If the loss falls badly, try --unfold-batchnorm."
        )


def _normalizes(node: ir.Node) -> bool:
    """Whether a node normalizes, is part of a normalization that was exported in steps, or is a quantizer."""
    return "Normalization" in node.op_type or node.op_type == "Sqrt" or is_quantizer(node)


def fitted_model(config: Config, model: ir.Model, data: Sequence[Dataset], tell: Tell) -> Config:
    """Replace the last layer of a model, in place, if the number of classes is another; then the options name that one."""
    texts = [d.source for d in data if isinstance(d.source, TextImages)]
    if texts:
        return _fitted_to_texts(config, model, texts, tell)
    counted, seen = count_classes(config, data, [v.name or "" for v in model.graph.inputs])
    if config.classes is not None and counted is not None and config.classes < counted:
        raise ArgumentError(
            f"--classes {config.classes} is fewer than the {counted} classes of the data.",
            hint="Give as many or more; 0 is the first class of the labels.",
        )
    wanted = config.classes or counted
    if wanted is None:
        return config
    head = _head(config, model)
    if head is not None:
        _check_axis(config, model, head)
    if head is None or head.classes == wanted:
        return config
    if config.classes is None and counted is not None and counted > 2 * len(seen):
        if counted < head.classes:
            return config  # a few classes of those that the model has
        _refuse_gaps(seen, head.classes)
    fresh = head.parameters
    text = _replaced(config, model, head, wanted, data[0].classes if len(data[0].classes) == wanted else None)
    if config.lora is not None and not config.wrt:  # adapters alone would leave it as it was drawn
        config = replace(config, wrt=("*.lora_*", *fresh), freeze_statistics=True)
        text += " It is trained with the adapters."
    if config.classes is not None:
        tell(text)
    elif wanted < head.classes:
        warn(f"{text} The data have {counted} classes; --classes {head.classes} keeps it.")
    elif len(seen) and seen[0] == 1 and len(seen) == head.classes:
        warn(f"{text} The labels count from 1 to {seen[-1]}; subtract 1 from all to keep it, for the first class is 0.")
    else:
        warn(f"{text} The data have {counted} classes.")
    return replace(config, classes=wanted)


def _replaced(config: Config, model: ir.Model, head: Head, wanted: int, labels: Sequence[str] | None) -> str:
    """Replace the last layer by one with so many classes; return what to say of it."""
    text = f"The last layer, {head.label}, had {head.classes} classes: it was replaced by one with {wanted}"
    with_new_head(model, wanted, head=config.head, seed=config.seed, labels=labels)
    return f"{text} and fresh weights."


def _check_axis(config: Config, model: ir.Model, head: Head) -> None:
    """Refuse classes along the last axis, as sequences have them, where the loss takes them along the second."""
    for output in model.graph.outputs:
        shape = output.shape
        if shape is None or len(shape) < 3 or "axis" in config.loss_options:
            continue
        second = head.features.of_result % len(shape) == 1 or shape[1] == head.classes
        if shape[-1] == head.classes and not second:
            raise ArgumentError(
                f"The output {output.name!r} has its {head.classes} classes along the last of {len(shape)} axes, and the "
                "loss takes them along axis 1.",
                hint="Give --loss-option axis=-1, for labels that are numbers of classes with all other axes.",
            )


def _refuse_gaps(seen: np.ndarray, count: int) -> None:
    """Refuse labels that would leave most classes of a new last layer without samples."""
    last = int(seen[-1])
    remedies = [
        f"If {last} marks what has no class, as in segmentation, give --loss-option ignore_index={last}",
        "else number the classes from 0 without gaps (np.unique(labels, return_inverse=True))",
    ]
    if last < _MANY:
        remedies.append(f"or give --classes {last + 1}")
    raise ArgumentError(
        f"The data have {len(seen)} different labels, the largest of which is {last}, and the model has {count} classes: "
        f"a last layer with {last + 1} would have mostly classes without samples.",
        hint=f"{'; '.join(remedies)}.",
    )


def _fitted_to_texts(config: Config, model: ir.Model, data: Sequence[TextImages], tell: Tell) -> Config:
    """Settle the alphabet, and replace the last layer if it has another number of classes."""
    if config.loss != ("ctc",):
        raise ArgumentError("Images with texts are for the loss ctc.", hint="Leave --loss out, or give --loss ctc.")
    blank = config.loss_options.get("blank", 0)
    head = _head(config, model)
    count = None if head is None else head.classes
    given = read_labels(Path(config.labels)) if config.labels else None
    own = labels_of(model)
    if given is not None:
        size = len(given) + 1
        alphabet = Alphabet.of_labels(given, count if count in (size - 1, size) else size, blank)
    elif own is not None:
        alphabet = Alphabet.of_labels(own, count, blank)
    else:
        alphabet = Alphabet.of_texts((text for d in data for text in d.texts), blank)
        tell(
            f"The model's file has no labels, and no --labels were given: the alphabet is that of the data, "
            f"{len(alphabet.labels) - 1} characters and the blank, which is class {blank}."
        )
    wanted = len(alphabet.labels)
    if config.classes not in (None, wanted):
        raise ArgumentError(
            f"--classes {config.classes} does not fit an alphabet of {wanted - 1} characters and a blank.",
            hint="Leave it out; --labels gives the alphabet.",
        )
    if head is not None and head.classes != wanted:
        tell(_replaced(config, model, head, wanted, alphabet.labels))
    for d in data:
        d.labels = alphabet.labels
    options = dict(config.loss_options)
    if "time_first" not in options and "time-first" not in options:
        ports = [Port.from_value(v) for v in model.graph.inputs if not v.is_initializer()]
        outputs = [Port.from_value(v).shape for v in model.graph.outputs]
        batch = ports[0].shape[0] if ports and ports[0].shape else None
        if len(outputs) == 1 and frames_first(outputs[0], batch):
            options["time_first"] = True
    return replace(config, loss_options=options)


def _head(config: Config, model: ir.Model) -> Head | None:
    """The last layer; `None` if it is not found and nothing says that it must be."""
    try:
        return find_head(model, config.head)
    except ConvGradError:
        if config.classes is None and config.head is None:
            return None  # a number that does not fit is refused with the remedy later
        raise


def count_classes(config: Config, data: Sequence[Dataset], inputs: Sequence[str]) -> tuple[int | None, np.ndarray]:
    """The number of classes in the data, and the labels that it has.

    The number is `None` if the loss is not over classes, or the labels are not certain.
    """
    none = np.zeros(0, np.int64)
    if not _is_over_classes(config):
        return None, none
    if data[0].classes:
        return len(data[0].classes), np.arange(len(data[0].classes))
    ignored, seen = config.loss_options.get("ignore_index", config.loss_options.get("ignore-index", -100)), none
    for dataset in data:
        targets = _targets(config, dataset.source, inputs) if isinstance(dataset.source, Arrays) else None
        counted = none if targets is None else targets[targets != ignored]
        if targets is None or counted.min(initial=0) < 0:
            return None, none  # a number below 0 is refused with the sample later
        seen = np.union1d(seen, counted)
    return (int(seen[-1]) + 1 if len(seen) else None), seen


def _is_over_classes(config: Config) -> bool:
    """Whether there is one loss, whose labels are numbers of classes."""
    kind = LOSSES.get(config.loss[0].rpartition("=")[2]) if len(config.loss) == 1 else None
    return kind is not None and issubclass(kind, ClassLoss) and not config.loss_options.get("probabilities")


def _targets(config: Config, arrays: Arrays, inputs: Sequence[str]) -> np.ndarray | None:
    """The array of labels, if it is certain and holds integers."""
    mapped = [name for port, _, name in (entry.partition("=") for entry in config.map) if port not in inputs]
    spare = [name for name in arrays.arrays if name not in inputs]
    usual = [name for name in spare if name.lower() in USUAL_TARGETS]
    for names in (mapped, [n for n in spare if n == "target"], usual, spare):
        if len(names) == 1 and names[0] in arrays.arrays:
            found = arrays.arrays[names[0]]
            return found if found.dtype.kind in "iu" and not _is_one_hot(found) else None
    return None


def _is_one_hot(targets: np.ndarray) -> bool:
    """Whether integers are one 1 among zeros along the second axis, as for each of several classes."""
    several = targets.ndim > 1 and targets.shape[1] > 1
    return several and bool(targets.min(initial=0) >= 0 and (targets.sum(1) == 1).all())
