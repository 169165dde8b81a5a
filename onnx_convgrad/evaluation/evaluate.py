"""Evaluate a model on data with labels: loss, scores of classes, confusion matrix, errors of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.data.datasets import Arrays as ArraySet
from onnx_convgrad.data.datasets import Dataset
from onnx_convgrad.data.files import ImageFiles, read_data, require_preprocessing
from onnx_convgrad.data.images import ImageFolder
from onnx_convgrad.data.inputs import Batch, ProgramInputs, as_array
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.data.texts import TextImages
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.evaluation.predict import (
    Data,
    described,
    label_names,
    probabilities,
    reading_of,
    squeezed,
)
from onnx_convgrad.evaluation.predictor import ModelOutput, Predictor, Task, open_model, reads_text, task_of
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.metrics import scores
from onnx_convgrad.metrics.batch_weights import add_losses, samples
from onnx_convgrad.metrics.class_metrics import AUROC, Accuracy, ConfusionMatrix
from onnx_convgrad.metrics.metric import Metric
from onnx_convgrad.metrics.progress import Progress
from onnx_convgrad.metrics.tally import measure, measured
from onnx_convgrad.metrics.texts import TextCounts, codes_of, decoded
from onnx_convgrad.programs.manifest import Port
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.prediction import batch_results
from onnx_convgrad.training.stream_states import carrying

_OUTPUT, _TARGET = "output", "target"


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores of one class against all others, or of one label; `support` is the number of samples that have it."""

    label: str
    precision: float
    recall: float
    f1: float
    auroc: float
    support: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The quality of a model's predictions.

    Attributes:
        samples: Number of samples.
        task: `"classes"`, `"labels"`, `"numbers"` or `"text"`.
        metrics: Name -> number: `loss` of a run; `accuracy`, `top5`, and the means over classes of `precision`, `recall`,
            `f1` and `auroc`; of numbers `mse`, `mae` and `r2`; of texts `exact` and `cer`.
        classes: The scores of every class or label.
        confusion: Counts `[C, C]` by true class (rows) and predicted class, or `[L, 2, 2]` of labels; `None` for numbers.
        labels: Names of the classes by number.
    """

    samples: int
    task: str
    metrics: Mapping[str, float]
    classes: tuple[ClassScores, ...] = ()
    confusion: np.ndarray | None = None
    labels: tuple[str, ...] = ()


@typed_errors
def evaluate(
    model: AnyModel,
    data: Data,
    *,
    output: str | None = None,
    task: str | None = None,
    names: Mapping[str, str] | None = None,
    top: int = 5,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    batch_size: int | None = None,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Evaluation:
    """Evaluate any ONNX model, or the folder of a training run, on data with labels.

    Other arguments as for `predict`.

    Args:
        model: As for `predict`. The folder of a run also gives the loss.
        data: A folder with one folder of images per class, `.npz` and `.npy` files, or arrays by name.
        output: The output to compare; by default that of the loss, or the only one.
        task: `"classes"`, `"labels"`, `"numbers"` or `"text"`, if model and labels do not settle it.
        names: Array of an input, if names and order do not settle it. Input -> name: `{"target": "y"}` for the labels.
        top: Number of most probable labels: the share of labels among them is computed, too, if there are more.

    Raises:
        ArgumentError: The data do not fit the model, or have no labels.
        ExecutionError: ONNX Runtime or a provider is missing, or cannot run the model.
        ModelError: The file is not a usable ONNX model.
    """
    found = open_model(model, loss=True, providers=providers, options=options)
    opened = described(found, labels, preprocessing)
    return evaluation(opened, read_data(data), output=output, task=task, names=names, top=top, batch_size=batch_size)


def evaluation(
    predictor: Predictor,
    data: Any,
    *,
    output: str | None = None,
    task: str | None = None,
    names: Mapping[str, str] | None = None,
    top: int = 5,
    batch_size: int | None = None,
) -> Evaluation:
    """Evaluate; arguments and errors as for `evaluate`, whose `data` are read already."""
    top = whole(top, "top")
    require_preprocessing(data, predictor.manifest)
    dataset = _comparable(data)
    chosen = predictor.output(output)
    if reads_text(predictor, chosen, task):
        return evaluated_texts(predictor, dataset, chosen, names, batch_size)
    if isinstance(dataset, TextImages):
        raise ArgumentError(
            f"The data are images with texts, and the output {chosen.name!r} was not trained to read texts.",
            hint="If it does, say so with --task text, in Python task=.",
        )
    predictor, port, matched = _with_labels(predictor, dataset, chosen, names)
    masked = None if predictor.counts is not None else dataset.masking(f"{port}_mask", matched[port])
    if masked is not None:
        m = predictor.manifest
        predictor = replace(predictor, manifest=replace(m, targets=(*m.targets, Port(f"{port}_mask", "bool", None))))
    dataset = (masked or dataset).bound(predictor.manifest)
    time = dataset.axis if isinstance(dataset, Sequences) else 1
    reading = _Reading(predictor, chosen, port, task, top, _classes_of(predictor, dataset), time)
    progress, count = Progress(), 0
    results_of = batch_results(
        predictor.manifest,
        dataset,
        carrying(predictor.manifest, predictor.run, [chosen.name]),
        batch_size,
        names=matched,
    )
    axes = predictor.manifest.batch_axes
    for batch, results, full in results_of:
        y, wanted = (np.moveaxis(a, axes.get(n, 0), 0) if axes.get(n) else a
                     for n, a in ((chosen.name, results[chosen.name]), (port, batch[port])))  # fmt: skip
        reading.add(progress, y, wanted, batch.get(f"{port}_mask"))
        if predictor.counts is not None and full:  # the loss of a padded batch is that of other samples
            add_losses(progress, predictor.counts, results, batch)
        count += samples(predictor.manifest, batch)
    return reading.result(progress, count)


def evaluated_texts(
    predictor: Predictor, dataset: Dataset, output: ModelOutput, names: Mapping[str, str] | None, batch_size: int | None
) -> Evaluation:
    """Compare decoded texts with those of the data: strings, or arrays of classes and lengths."""
    reading, progress, counted = reading_of(predictor, output), Progress(), TextCounts()
    m = predictor.manifest
    strings = dataset.texts if isinstance(dataset, TextImages) else None
    term = predictor.loss_of(output.name)
    name = (term or {}).get("target") or _TARGET
    matched, source = None, dataset if strings is None else None
    if predictor.counts is None:
        codes = [Port(name, "int64", None), Port(f"{name}_lengths", "int64", None)] if strings is None else []
        m = replace(m, targets=tuple(codes), losses=m.losses if strings is None else ())
    if source is not None and (names or m.targets):
        matched = ProgramInputs(m, names).match(list(source.bound(m).take(slice(0, 1))))
    axis = 1 if reading.time_first else 0

    carried = carrying(predictor.manifest, predictor.run, [output.name])

    def run(batch: Batch) -> Mapping[str, Any]:
        results = carried(batch)
        return {**results, output.name: np.moveaxis(np.asarray(results[output.name]), axis, 0)}

    for batch, results, full in batch_results(m.batch_first(output.name), dataset, run, batch_size, names=matched):
        frames = np.asarray(results[output.name])
        if frames.ndim != 3:
            reading.frames(frames)  # says what is wrong
        probable, alphabet = reading.of(frames)
        texts = [text.text for text in decoded(probable, alphabet)]
        start = counted.samples
        if strings is None:
            wanted = [alphabet.decode(codes) for codes in codes_of(batch[name], batch[f"{name}_lengths"])]
        else:
            wanted = strings[start : start + len(texts)]
        for text, own in zip(texts, wanted, strict=True):
            counted.add(text, own)
        if predictor.counts is not None and full:
            add_losses(progress, predictor.counts, results, batch)
    if not counted.samples:
        raise ArgumentError("The data to evaluate on give no batches.", hint="Give at least one sample.")
    return Evaluation(counted.samples, Task.TEXT, {**measured(progress, []), **counted.result()})


class _Reading:
    """Collects metrics over batches. What the output means is settled with the first batch.

    `time` is the axis of time, where labels are sequences.
    """

    def __init__(
        self,
        predictor: Predictor,
        output: ModelOutput,
        port: str,
        task: str | None,
        top: int,
        labels: tuple[str, ...],
        time: int,
    ) -> None:
        self.predictor, self.output, self.port, self.task, self.top = predictor, output, port, task, top
        self.labels, self.time = labels, time
        term = predictor.loss_of(output.name) or {"options": {}}
        self.ignored, self.axis = term["options"].get("ignore_index", -100), term["options"].get("axis")
        self.metrics: list[Metric] = []
        self.errors = scores.Errors()
        self.count = 0

    def add(self, progress: Progress, y: np.ndarray, target: np.ndarray, mask: np.ndarray | None) -> None:
        """Take a batch; labels whose entry in the mask is 0 are padding, and do not count."""
        if mask is not None and y.size == target.size:  # a label for each number: entries count as samples
            timed = [np.moveaxis(a, self.time, 1) if a.ndim > self.time else a for a in (y, target)]
            if any(a.shape[:2] != mask.shape for a in timed):
                raise ArgumentError(
                    f"The output has the shape {y.shape} in a batch, and its labels, which are sequences, {target.shape}.",
                    hint="Evaluate with batch_size=1, or name an output with the entries of each sequence.",
                )
            y, target = (a[mask.astype(bool)] for a in timed)
            mask, self.axis = None, None
        flat = squeezed(y)
        if flat is not y or y.ndim < 2:
            y, self.axis = flat, None
        if mask is not None and self.ignored is None:
            self.ignored = -100
        if not self.count:
            self._begin(y, target)
        if self.task == Task.NUMBERS:
            self.errors.add(y, target)
            return
        if mask is not None:
            sizes = [n if i in (0, min(self.time, target.ndim - 1)) else 1 for i, n in enumerate(target.shape)]
            target = np.where(mask.reshape(sizes), target, self.ignored)
        values = probabilities(y, self.output, self.task or "", self.axis)
        measure(progress, self.metrics, {_OUTPUT: values}, {_TARGET: target})

    def _begin(self, y: np.ndarray, target: np.ndarray) -> None:
        """Settle the task and choose the metrics."""
        width = y.shape[1] if y.ndim > 1 else 1
        if self.axis is None and y.ndim > 2 and target.shape == y.shape[:-1] != (len(y), *y.shape[2:]):
            self.axis = -1  # classes last, as sequence models have them
        self.task = self.task or task_of(self.predictor, self.output, y.ndim, width, target)
        axis = min(1, y.ndim - 1) if self.axis is None else self.axis
        self.count = y.shape[axis] if self.task == Task.CLASSES else width
        if self.task == Task.NUMBERS:
            return
        if self.task == Task.LABELS and target.size != y.size:
            raise ArgumentError(
                f"The output {self.output.name!r} has the shape {y.shape} in a batch, and its labels {target.shape}: each "
                "number of the output needs a 0 or a 1.",
                hint="If the labels are numbers of classes, say so with --task classes, in Python task=.",
            )
        own: dict[str, Any] = {"output": _OUTPUT, "target": _TARGET, "ignored": self.ignored, "axis": self.axis}
        own |= {"logits": False, "binary": self.task == Task.LABELS}
        self.metrics = [Accuracy(**own)]
        if self.task == Task.CLASSES and 1 < self.top < self.count:
            self.metrics.append(Accuracy(self.top, **own))
        self.metrics.append(ConfusionMatrix(**own))
        if y.ndim <= 2:  # of each pixel of segmentations it would take the memory of all outputs
            self.metrics.append(AUROC(**own))

    def result(self, progress: Progress, count: int) -> Evaluation:
        if not count:
            raise ArgumentError("The data to evaluate on give no batches.", hint="Give at least one sample.")
        values = measured(progress, self.metrics)
        if self.task == Task.NUMBERS:
            return Evaluation(count, Task.NUMBERS, {**values, **self.errors.result()})
        counts = np.asarray(values.pop("confusion"))
        if not counts.any():
            raise ArgumentError(
                f"All labels are {self.ignored}, which stands for those that do not count: there is nothing to evaluate.",
                hint="Give data of which some labels are classes.",
            )
        precision, recall, f1, support = scores.precision_recall_f1(counts)
        areas = np.full(len(counts), np.nan)
        if "auroc" in values:
            areas = self.metrics[-1].areas(progress.collected["auroc"])  # type: ignore[attr-defined]
        means = {name: scores.mean_over_classes(v, counts) for name, v in
                 (("precision", precision), ("recall", recall), ("f1", f1))}  # fmt: skip
        last = {name: values.pop(name) for name in ("auroc",) if name in values}
        labels = self._names(len(counts))
        rows = [
            ClassScores(name, float(precision[i]), float(recall[i]), float(f1[i]), float(areas[i]), int(support[i]))
            for i, name in enumerate(labels)
        ]
        return Evaluation(count, self.task or "", {**values, **means, **last}, tuple(rows), counts, labels)

    def _names(self, count: int) -> tuple[str, ...]:
        known = self.predictor.manifest.labels
        if count == 1:  # the positive class
            return (known[-1],) if known and len(known) <= 2 else ("positive",)
        return self.labels if known is None and len(self.labels) == count else label_names(self.predictor, count)


def _comparable(data: Any) -> Dataset:
    """The data as a set; raises `ArgumentError` for data that can have no labels."""
    if isinstance(data, Mapping):
        data = ArraySet(data)
    if isinstance(data, ImageFiles):
        raise ArgumentError(
            "These images have no classes to compare with.",
            hint="Give a folder with one folder of images per class; `predict` needs no classes.",
        )
    if not isinstance(data, Dataset):
        raise ArgumentError(
            f"{type(data).__name__} is not data to evaluate on.",
            hint="Give arrays by name, an .npz file, or a folder with one folder of images per class.",
        )
    return data


def _with_labels(
    predictor: Predictor, dataset: Dataset, output: ModelOutput, given: Mapping[str, str] | None
) -> tuple[Predictor, str, dict[str, str]]:
    """Decide which array holds the labels; return the predictor with an input for it, its name, and the arrays of all."""
    m = predictor.manifest
    arrays = dataset.bound(m if predictor.counts is not None else replace(m, losses=())).take(slice(0, 1))
    term = predictor.loss_of(output.name)
    port = (term or {}).get("target") or _TARGET
    own = m.targets if predictor.counts is not None else tuple(p for p in m.targets if p.name == port)
    ports = own or (Port(port, "float32", None),)
    try:
        names = ProgramInputs(replace(m, targets=ports), given).match(list(arrays))
    except ArgumentError as problem:
        option = f"Name the array with the labels: --map {port}=ARRAY, in Python names={{{port!r}: 'ARRAY'}}."
        raise ArgumentError(problem.message, hint=problem.hint if given else option) from None
    if predictor.counts is None:  # any numbers will do: they are not fed
        ports = tuple(replace(p, dtype=str(as_array(arrays[names[p.name]]).dtype), shape=None) for p in ports)
    for p in (p for p in ports if p.name in names):  # weights of samples may be missing
        kind = as_array(arrays[names[p.name]]).dtype
        if kind.kind not in "biuf":
            raise ArgumentError(
                f"The array {names[p.name]!r} with the labels holds {kind}, not numbers.",
                hint="Number the classes from 0; --labels names them.",
            )
    return replace(predictor, manifest=replace(m, targets=ports)), port, names


def _classes_of(predictor: Predictor, dataset: Dataset) -> tuple[str, ...]:
    """The classes of a folder of images, which must be numbered as in the model."""
    labels = predictor.manifest.labels
    if isinstance(dataset, ImageFolder) and labels is not None and tuple(dataset.classes) != tuple(labels):
        unknown = [name for name in dataset.classes if name not in labels]
        raise ArgumentError(
            f"The folder has the class {(unknown or list(dataset.classes))[0]!r}, which is not among the "
            f"{len(labels)} labels of the model ({', '.join(labels[:5])}{', ...' if len(labels) > 5 else ''}).",
            hint="Rename the folders like the labels, or give the labels with --labels.",
        )
    return tuple(dataset.classes)
