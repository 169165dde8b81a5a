"""Predict with a model: its outputs over data, as classes with probabilities, labels, or numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import as_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.data.alphabet import Alphabet
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.data.files import read_data, require_preprocessing, sample_names
from onnx_convgrad.data.image_set import overridden, wanted_preprocessing
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.evaluation.predictor import ModelOutput, Predictor, Task, open_model, reads_text, task_of
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.metrics import scores
from onnx_convgrad.metrics.texts import decoded, frames_first, samples_first
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.prediction import predict as outputs_over
from onnx_convgrad.training.stream_states import carrying

Data = DataLike | Sequence[str | os.PathLike[str]]
"""Data, or the paths of files and folders that `read_data` reads."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of a model for each sample.

    Attributes:
        names: The file of each sample, or its number.
        task: `"classes"` (one of several), `"labels"` (each present or not), `"numbers"` or `"text"`.
        outputs: All floating outputs by name, with the samples along axis 0, or along another where the model has them so.
        values: Probabilities `[N, C]` of classes or labels, or the numbers `[N, ...]`.
        labels: Names of the classes or labels by number, or characters; empty for numbers.
        texts: The decoded text of each sample; `values` are their confidences `[N]` then: the mean probability of the
            characters.
    """

    names: tuple[str, ...]
    task: str
    outputs: Mapping[str, np.ndarray]
    values: np.ndarray
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    @typed_errors
    def top(self, count: int = 1) -> list[list[tuple[str, float]]]:
        """For each sample the labels with the largest probabilities, and these, in order; of texts the only one.

        Args:
            count: Number of labels.

        Raises:
            ArgumentError: The predictions are numbers, or of each position of a sample.
        """
        count = whole(count, "count")
        if self.task == Task.NUMBERS:
            raise ArgumentError(
                f"These predictions are numbers of the shape {self.values.shape}, without one label for each sample.",
                hint="Read values or outputs; of logits [N, C, ...] the classes are values.argmax(1).",
            )
        if self.task == Task.TEXT:
            return [[(text, float(p))] for text, p in zip(self.texts, self.values, strict=True)]
        places = np.argsort(-self.values, axis=1, kind="stable")[:, :count]
        rows = np.take_along_axis(self.values, places, 1)
        return [
            [(self.labels[i], float(p)) for i, p in zip(r, v, strict=True)] for r, v in zip(places, rows, strict=True)
        ]


@typed_errors
def predict(
    model: AnyModel,
    data: Data,
    *,
    output: str | None = None,
    task: str | None = None,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    batch_size: int | None = None,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Predictions:
    """Predict with any ONNX model, or with the folder of a training run.

    Probabilities are those of the output if it ends in Softmax or Sigmoid, or adds up to 1; else its Softmax, or its
    Sigmoid if the model was trained with `bce_with_logits`. `providers` and `options` are as for `Trainer`.

    Args:
        model: A path, a model, or the folder of a run, whose best model is used, else the trained one, else the newest
            checkpoint.
        data: Image files, a folder of images, `.npz` and `.npy` files, arrays by name, one array, or batches. Labels are
            ignored.
        output: The output to read; by default that of the loss, or the only one.
        task: Meaning of the output, if the model does not settle it: `"classes"`, `"labels"`, `"numbers"` or `"text"`. Texts
            are decoded greedily (CTC).
        labels: Names of the classes, or characters. By default those in the metadata of the file.
        preprocessing: Usual mean and std of images: `"imagenet"`, `"clip"`, `"inception"` ([-1, 1]), `"unit"` ([0, 1]) or
            `"raw"`. Or the whole way from images to inputs, a `Preprocessing`; by default what the metadata of the file say.
        batch_size: Samples at a time. By default those that the model takes, or 32.

    Raises:
        ArgumentError: The data do not fit the model, or the file does not say how images are prepared.
        ExecutionError: ONNX Runtime or a provider is missing, or cannot run the model.
        ModelError: The file is not a usable ONNX model.
    """
    found = open_model(model, providers=providers, options=options)
    opened = described(found, labels, preprocessing)
    return predictions(opened, read_data(data), output=output, task=task, batch_size=batch_size)


def described(
    predictor: Predictor, labels: Sequence[str] | None, preprocessing: Preprocessing | str | None
) -> Predictor:
    """The predictor with other labels and another preprocessing, where they are given."""
    m = predictor.manifest
    wanted, named = wanted_preprocessing(preprocessing)
    how = overridden(wanted or m.preprocessing, named) if named else wanted or m.preprocessing
    names = m.labels if labels is None else as_names(labels, "labels")
    return replace(predictor, manifest=m.described(names, how), labeled=labels is not None)


def predictions(
    predictor: Predictor,
    data: Any,
    *,
    output: str | None = None,
    task: str | None = None,
    batch_size: int | None = None,
) -> Predictions:
    """Predict; arguments and errors as for `predict`, whose `data` are read already."""
    require_preprocessing(data, predictor.manifest)
    chosen = predictor.output(output)
    names = [o.name for o in predictor.outputs]
    if reads_text(predictor, chosen, task):
        return _texts(predictor, data, chosen, batch_size)
    outputs = outputs_over(predictor.manifest, data, carrying(predictor.manifest, predictor.run, names), batch_size)
    y = np.moveaxis(outputs[chosen.name], predictor.manifest.batch_axes.get(chosen.name, 0), 0)
    y = y if task is None and _along_data(predictor, chosen) else squeezed(y)
    task = task or task_of(predictor, chosen, y.ndim, y.shape[1] if y.ndim > 1 else 1)
    samples = sample_names(data, len(y))
    if task == Task.NUMBERS or y.ndim > 2:
        return Predictions(samples, Task.NUMBERS, outputs, y)
    values = probabilities(y, chosen, task).reshape(len(y), -1)
    if values.shape[1] == 1:  # one probability: that of the second of two classes
        values, task = np.column_stack([1 - values, values]), Task.CLASSES
    return Predictions(samples, task, outputs, values, label_names(predictor, values.shape[1]))


def _along_data(predictor: Predictor, output: ModelOutput) -> bool:
    """Whether an output has a size of the data besides that of the samples, such as time, which counts no classes."""
    m = predictor.manifest

    def sizes(name: str, shape: tuple[int | str | None, ...] | None) -> set[str]:
        samples = m.batch_axes.get(name, 0)
        return {size for axis, size in enumerate(shape or ()) if axis != samples and isinstance(size, str)}

    of_data = set[str]().union(*(sizes(port.name, port.shape) for port in m.data))
    return bool(sizes(output.name, output.shape) & of_data)


def _texts(predictor: Predictor, data: Any, output: ModelOutput, batch_size: int | None) -> Predictions:
    """Predict texts; the outputs are those of the frames, `[N, T, classes]`."""
    reading = reading_of(predictor, output)

    carried = carrying(predictor.manifest, predictor.run, [output.name])

    def run(batch: Batch) -> Mapping[str, Any]:
        return {output.name: reading.frames(np.asarray(carried(batch)[output.name]))}

    found = outputs_over(predictor.manifest.batch_first(output.name), data, run, batch_size)
    texts = decoded(*reading.of(found[output.name]))
    confidences = np.array([text.confidence for text in texts])
    labels = reading.alphabet(found[output.name].shape[2]).labels
    names = sample_names(data, len(texts))
    return Predictions(names, Task.TEXT, found, confidences, labels, tuple(text.text for text in texts))


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read texts off an output."""

    predictor: Predictor
    output: ModelOutput
    blank: int
    time_first: bool

    def frames(self, y: np.ndarray) -> np.ndarray:
        """A batch of the output as `[N, T, classes]`."""
        return samples_first(y, self.output.name, time_first=self.time_first)

    def alphabet(self, classes: int) -> Alphabet:
        """The characters; raises `ArgumentError` if they are not known, or not as many as there are classes."""
        labels = self.predictor.manifest.labels
        if labels is None:
            raise ArgumentError(
                "The model's file does not say which characters its classes are: it has no metadata 'onnx_convgrad.labels'.",
                hint="Give them with --labels FILE (one on each line, by class), in Python labels=.",
            )
        return Alphabet.of_labels(labels, classes, self.blank)

    def of(self, frames: np.ndarray) -> tuple[np.ndarray, Alphabet]:
        """Probabilities and alphabet of a batch of frames."""
        return probabilities(frames, self.output, Task.CLASSES, 2), self.alphabet(frames.shape[2])


def reading_of(predictor: Predictor, output: ModelOutput) -> Reading:
    """The way to read texts off an output: as its loss says, else with blank 0 and the axes that its shape tells."""
    options = (predictor.loss_of(output.name) or {"options": {}})["options"]
    data = next((p.shape[0] for p in predictor.manifest.data if p.shape), None)
    first = options["time_first"] if "time_first" in options else frames_first(output.shape, data)
    return Reading(predictor, output, options.get("blank", 0), first)


def squeezed(y: np.ndarray) -> np.ndarray:
    """Leave out axes of one entry, of an output with one axis besides that of the samples: [N, C, 1, 1], [N, 1, 1, C]."""
    single = y.ndim > 2 and sum(size > 1 for size in y.shape[1:]) <= 1
    return y.reshape(len(y), -1) if single and len(y) else y


def probabilities(y: np.ndarray, output: ModelOutput, task: str, axis: int | None = None) -> np.ndarray:
    """The probabilities of an output: as they are if it ends in Softmax or Sigmoid, else its Softmax or Sigmoid."""
    if output.activation == "LogSoftmax":
        return np.exp(y.astype(np.float64))
    if output.activation:
        return y
    if task == Task.LABELS:
        return scores.sigmoid(y)
    axis = min(1, y.ndim - 1) if axis is None else axis
    if (y >= 0).all() and np.allclose(y.sum(axis), 1, atol=1e-3):  # a Softmax of several nodes, or of another domain
        return y
    return scores.softmax(y, axis)


def label_names(predictor: Predictor, count: int) -> tuple[str, ...]:
    """The names of the classes, or their numbers.

    Raises:
        ArgumentError: There are more or fewer names than classes.
    """
    labels = predictor.manifest.labels
    if labels is None:
        return tuple(map(str, range(count)))
    if len(labels) != count:
        raise ArgumentError(
            f"There are {len(labels)} labels, and the output has {count} classes.",
            hint="Give the right ones with --labels, in Python labels=.",
        )
    return labels
