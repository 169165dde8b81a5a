"""Open a model that is used as it is: an ONNX file of anyone, or what a training run has made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.inputs import Batch
from onnx_convgrad.errors import ArgumentError, ExecutionError, ModelError
from onnx_convgrad.frontend.bound_inputs import InputValues, bound_arrays, by_input, with_all_axes
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.metadata import declare_states, labels_of, outputs_beside, preprocessing_of, states_of
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.metrics.batch_weights import BINARY_LOSSES, CLASS_LOSSES, Counts
from onnx_convgrad.programs.batch_axes import batch_axes
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.reading import meaning_of
from onnx_convgrad.runtime import Providers, SessionOptionsLike, check_arrays_of, session
from onnx_convgrad.training.run_folder import CHECKPOINTS, PROGRAM, class_names, trained_file
from onnx_convgrad.training.sessions import fed_session
from onnx_convgrad.training.trainer import Trainer

_ALONE = "Name the file instead of the folder."

Compute = Callable[[Batch, Sequence[str]], Mapping[str, Any]]
"""Computes outputs, by name, of a batch."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An output of a model.

    Attributes:
        activation: `Softmax`, `LogSoftmax` or `Sigmoid`, if it computes the output, or probabilities that are pooled to it.
        shape: Sizes, as in a `Port`.
    """

    name: str
    activation: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model with what is known of it.

    Attributes:
        manifest: Inputs, labels and preprocessing, and, of a model that this package has trained, its losses.
        outputs: The floating outputs.
        run: Runs it.
        counts: Counts what the losses of the manifest are joined by, if `run` takes labels and computes these.
        labeled: Whether the caller gave the labels.
    """

    manifest: Manifest
    outputs: tuple[ModelOutput, ...]
    run: Compute
    counts: Counts | None = None
    labeled: bool = False

    def output(self, name: str | None = None) -> ModelOutput:
        """The output to read: by name, that of the loss, or the only one.

        Raises:
            ArgumentError: There are several, or none.
        """
        names = [output.name for output in self.outputs]
        if name is None:
            losses = list(dict.fromkeys(t["output"] for t in self.manifest.losses if t["output"] in names))
            certain = losses or [o.name for o in self.outputs if o.activation] or names
            if len(certain) != 1:
                raise ArgumentError(
                    f"The model has {len(names)} floating outputs ({', '.join(names)}).",
                    hint="Name one with --of, in Python output=." if names else "",
                )
            (name,) = certain
        check_names([name], names, "output")
        return self.outputs[names.index(name)]

    def loss_of(self, output: str) -> Mapping[str, Any] | None:
        """The loss that an output was trained with; of several, the first one that says what the output means."""
        terms = [term for term in self.manifest.losses if term["output"] == output]
        telling = [term for term in terms if term["loss"] in (*CLASS_LOSSES, *BINARY_LOSSES, "CTC")]
        return next(iter([*telling, *terms]), None)


def open_model(
    model: AnyModel,
    *,
    loss: bool = False,
    input_values: InputValues | None = None,
    states: Mapping[str, str] | None = None,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Predictor:
    """Open a model, or the folder of a training run: its best model, else the trained one, else the newest checkpoint.

    With `loss`, the model of a run also computes its loss. Inputs that were bound to constants when the model was trained
    keep these values; `input_values` binds others, or gives other values. `states` are as for `load`.

    Raises:
        ArgumentError: The folder is not that of a run, or a value or a state does not fit the inputs.
        ModelError: The file is not a usable ONNX model, or an input is not a tensor of numbers.
    """
    if not isinstance(model, (str, os.PathLike)) or not as_path(model, "The model").is_dir():
        return _of_file(model, input_values, states, providers, options)
    folder = Path(model)
    file, names = trained_file(folder), class_names(folder)
    if file is None and (input_values or states):
        raise ArgumentError(
            f"{str(folder)!r} holds only checkpoints, which keep the values of inputs and the states of their training.",
            hint="Leave --input-value and --states out.",
        )
    if (file is None or (loss and not (input_values or states))) and (folder / PROGRAM).is_dir():
        opened = _of_run(folder, file, loss=loss, providers=providers, options=options)
    else:
        opened = _of_file(file or folder, input_values, states, providers, options)
    m = opened.manifest
    return replace(opened, manifest=m.described(m.labels or names, m.preprocessing))


def _of_file(
    model: AnyModel,
    values: InputValues | None,
    states: Mapping[str, str] | None,
    providers: Providers | None,
    options: SessionOptionsLike | None,
) -> Predictor:
    loaded = read(model)
    declare_states(loaded, states)
    stored = set(loaded.graph.initializers)
    bound = _bound(loaded, values or {})
    ports = tuple(_port(v) for v in loaded.graph.inputs if v.name not in stored and v.name not in bound)
    if not ports:
        raise ModelError("The model has no inputs to feed data to.", hint="Name another model.")
    if isinstance(model, (str, os.PathLike)):
        live = session(str(model), providers=providers, options=options)
    else:
        live = fed_session(loaded, (), providers=providers, options=options)

    def run(batch: Batch, names: Sequence[str]) -> Mapping[str, Any]:
        try:
            fed = {p.name: batch[p.name] for p in ports}
            found = live.run(list(names), {**with_all_axes(bound, loaded.graph.inputs, fed), **fed})
            return dict(zip(names, found, strict=True))
        except Exception as problem:
            raise ExecutionError(
                f"ONNX Runtime could not run the model: {problem}",
                hint="Compare the shapes of the data with those of the inputs: `python -m onnx_convgrad inspect MODEL`.",
            ) from problem

    return Predictor(_manifest(loaded, ports), _outputs(loaded), run)


def _bound(model: ir.Model, values: InputValues) -> dict[str, np.ndarray]:
    """Input -> the constant that it is fed: a given one, or that of the training."""
    inputs = {v.name or "": v for v in model.graph.inputs}
    if not isinstance(values, Mapping):
        raise ArgumentError(f"input_values must map names of inputs to their values, not {values!r:.60}.")
    text = model.metadata_props.get(MANIFEST)
    known = {} if text is None else Manifest.from_json(text).options.get("input_values") or {}
    before = {name: value for name, value in known.items() if name in inputs}
    return bound_arrays(list(inputs.values()), {**before, **by_input(values, inputs)})


def _of_run(folder: Path, file: Path | None, *, loss: bool, providers: Any, options: Any) -> Predictor:
    """The program of a run with the values of one of its files, or of its newest checkpoint."""
    trainer = Trainer(folder / PROGRAM, providers, options=options)
    if file is None:
        trainer.restore(folder / CHECKPOINTS)
        described = trainer.program.model("inference")
    elif trainer.manifest.options.get("quantization"):  # the file has integers for the weights of the program
        return _of_file(file, None, None, providers, options)
    else:
        described = read(file)
        stored = described.graph.initializers
        missing = [p.name for p in trainer.manifest.stored() if p.name not in stored]
        if missing:
            raise ModelError(f"{str(file)!r} has no {missing[0]!r}, which the program beside it trains.", hint=_ALONE)
        tensors = {p.name: stored[p.name].const_value for p in trainer.manifest.stored()}
        trainer.load({name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None})
    outputs = _outputs(described)
    m = trainer.manifest.described(
        labels_of(described) or trainer.manifest.labels, preprocessing_of(described) or trainer.manifest.preprocessing
    )
    if loss and {output.name for output in outputs} <= set(m.outputs):
        engine = trainer.engine
        return Predictor(m, outputs, lambda b, names: engine.evaluate(b, (*names, *engine.losses)), engine.counts)
    data = [p.name for p in m.data]
    return Predictor(m, outputs, lambda b, names: trainer.engine.predict({n: b[n] for n in data}, names))


def _manifest(model: ir.Model, ports: tuple[Port, ...]) -> Manifest:
    """Describe a file: its own inputs, and the losses that it was trained with, if this package has trained it."""
    losses: tuple[Mapping[str, Any], ...] = ()
    targets: tuple[Port, ...] = ()
    weight: str | None = None
    text = model.metadata_props.get(MANIFEST)
    if text is not None:
        trained = Manifest.from_json(text)
        losses, targets, weight = trained.losses, trained.targets, trained.sample_weight
    axes = batch_axes(model, [port.name for port in ports])
    options: dict[str, Any] = {"batch_axes": axes} if axes else {}
    options |= {} if weight is None else {"sample_weight": weight}
    options["states"] = {n: o for n, o in states_of(model).items() if n in {port.name for port in ports}}
    plain = Manifest(ports, targets, Port("", "float32", ()), "", (), (), (), (), losses=losses, options=options)
    return plain.described(labels_of(model), preprocessing_of(model))


def _port(value: ir.Value) -> Port:
    if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise ModelError(
            f"The input {value.name!r} is not a tensor of numbers, so no data can be fed to it.",
            hint="If it is to be constant, bind it: onnx_convgrad.load(path, input_values=...), --input-value.",
        )
    check_arrays_of(value.dtype.numpy())
    return Port.from_value(value)


def _outputs(model: ir.Model) -> tuple[ModelOutput, ...]:
    """The floating outputs that are not states, or all of them if all are."""
    values = {v.name or "": v for v in model.graph.outputs}
    floats = {name: v for name, v in values.items() if v.dtype is not None and v.dtype.is_floating_point()}
    chosen = [(name, floats[name]) for name in outputs_beside(states_of(model), floats)]
    return tuple(ModelOutput(name, meaning_of(v), Port.from_value(v).shape) for name, v in chosen)


# -- what an output means ----------------------------------------------------------------------------------------------


class Task:
    """The meanings of an output: exclusive classes, labels that are each 0 or 1, numbers, or frames of a text."""

    CLASSES, LABELS, NUMBERS, TEXT = ALL = "classes", "labels", "numbers", "text"


def reads_text(predictor: Predictor, output: ModelOutput, task: str | None = None) -> bool:
    """Whether an output is to be decoded as texts: as asked, or since it was trained with CTC.

    Raises:
        ArgumentError: The task is unknown.
    """
    if task is not None:
        check_names([task], Task.ALL, "task")
    term = predictor.loss_of(output.name)
    return task == Task.TEXT or (task is None and term is not None and term["loss"] == "CTC")


def task_of(predictor: Predictor, output: ModelOutput, rank: int, width: int, target: np.ndarray | None = None) -> str:
    """The meaning of an output, from the loss it was trained with, its last operator, its shape, and some labels.

    `rank` is its number of axes, and `width` its size along axis 1, or 1 if it has none.
    """
    term = predictor.loss_of(output.name)
    if term is not None and term["loss"] in CLASS_LOSSES:
        return Task.CLASSES
    if term is not None and term["loss"] in BINARY_LOSSES:
        return Task.LABELS
    if output.activation:
        return Task.LABELS if output.activation == "Sigmoid" else Task.CLASSES
    if term is not None and term["loss"] in ("MSE", "L1", "Huber"):
        return Task.NUMBERS
    if target is not None:
        whole = target.dtype.kind in "biu"
        single = target.ndim == rank - 1 or (target.ndim == rank > 1 and target.shape[1] == 1)
        if whole and width > 1 and single:
            return Task.CLASSES
        return Task.LABELS if whole and bool(np.isin(target, (0, 1)).all()) else Task.NUMBERS
    labels = predictor.manifest.labels
    named = predictor.labeled or labels is None or len(labels) == width
    return Task.CLASSES if width > 1 and named else Task.NUMBERS
