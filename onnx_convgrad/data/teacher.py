"""Data with the predictions of a teacher, for distillation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.data.batches import DataLike, as_dataset, first_of
from onnx_convgrad.data.datasets import Dataset, Part, Rows
from onnx_convgrad.data.inputs import Batch, ProgramInputs, cast
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.frontend.endings import Ending
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.modes import set_inference
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.reading import meaning_of
from onnx_convgrad.runtime import Providers, SessionOptionsLike, session

_TINY = np.float32(1e-37)
"""Smallest probability of a class, whose logarithm is a logit."""


class Teacher:
    """A model in inference mode, which computes logits from batches; see `with_teacher` for the arguments."""

    def __init__(
        self,
        model: AnyModel,
        *,
        output: str | None = None,
        name: str = "teacher",
        names: Mapping[str, str] | None = None,
        providers: Providers | None = None,
        options: SessionOptionsLike | None = None,
    ) -> None:
        self.file = Path(model).name if isinstance(model, (str, os.PathLike)) else "model"
        self.name, self.names = name, names
        m = read(model)
        for graph in m.graphs():
            set_inference(graph)
        known = [v.name or "" for v in m.graph.outputs if floating(v)]
        if output is not None:
            check_names([output], known, "output of the teacher:")
        elif len(known) != 1:
            raise ArgumentError(
                f"The teacher has {len(known)} floating outputs ({', '.join(known)}), not one.",
                hint="Name that with the logits: output=...",
            )
        value = next(v for v in m.graph.outputs if v.name == (output or known[0]))
        ending, meaning = Ending.of(value), meaning_of(value)
        if meaning == "Sigmoid":
            raise ArgumentError(
                "The teacher ends in Sigmoid, and distillation compares classes that exclude each other.",
                hint="Use a teacher with logits or a Softmax.",
            )
        self.probabilities = meaning == "Softmax"
        direct = ending.activation == "Softmax" and all(is_op(n, "Identity") for n in ending.layout)
        if direct and ending.last is not None:
            value, self.probabilities = ending.last.inputs[0] or value, False
        m.graph.outputs.clear()
        m.graph.outputs.append(value)
        self.ports = [Port.from_value(v) for v in m.graph.inputs if not v.is_initializer()]
        self.session = session(m, providers=providers, options=options)

    def teaching(self, dataset: Dataset) -> Dataset:
        """A data set with the logits; one of a part is a part, whose samples keep their numbers."""
        if isinstance(dataset, Part):
            return Part(self.teaching(dataset.dataset), dataset.rows)
        if isinstance(dataset, Sequences):
            raise ArgumentError(
                "A teacher computes the logits of samples, and parts of sequences would each begin its states anew.",
                hint="Compute its outputs with og.predict over the same data.Sequences, and give them as an array.",
            )
        return Taught(dataset, self)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The logits of a batch, whose arrays have the names of the teacher's inputs or their order."""
        names = [port.name for port in self.ports]
        chosen = dict(zip(names, batch.values(), strict=False)) if not set(names) <= batch.keys() else batch
        if len(names) > len(batch):
            raise ArgumentError(
                f"The teacher has {len(names)} inputs ({', '.join(names)}), and the program {len(batch)}.",
                hint="Use a teacher with the inputs of the model, or bind the others: load(path, input_values=...).",
            )
        fixed = next((p.shape[0] for p in self.ports if p.shape and isinstance(p.shape[0], int)), None)
        count = len(next(iter(batch.values())))
        parts = []
        for start in range(0, count, fixed or max(count, 1)):
            rows = np.minimum(np.arange(start, start + (fixed or count)), count - 1)  # the last sample fills up a batch
            feeds = {p.name: cast(chosen[p.name][rows], p, f"input {p.name!r} of the teacher") for p in self.ports}
            try:
                (logits,) = self.session.run(None, feeds)
            except Exception as problem:
                raise ExecutionError(f"ONNX Runtime could not run the teacher: {problem}") from problem
            parts.append(np.log(np.maximum(logits, _TINY)) if self.probabilities else logits)
        return np.concatenate(parts)[:count]


class Taught(Dataset):
    """A data set whose batches hold the logits of a teacher, too; see `with_teacher`."""

    slow = True

    def __init__(
        self, dataset: Dataset, teacher: Teacher, inputs: ProgramInputs | None = None, program: Manifest | None = None
    ) -> None:
        self.dataset, self.teacher, self.inputs, self.program = dataset, teacher, inputs, program
        self.classes, self.preprocessing = dataset.classes, dataset.preprocessing

    def __len__(self) -> int:
        return len(self.dataset)

    def bound(self, manifest: Manifest) -> Dataset:
        name = self.teacher.name
        targets = tuple(port for port in manifest.targets if port.name != name)
        if len(targets) == len(manifest.targets):
            raise ArgumentError(
                f"The program has no input {name!r} for the predictions of the teacher.",
                hint="Build it with loss=onnx_convgrad.losses.distillation(...), or give the name of the input as name=.",
            )
        own = replace(manifest, targets=targets)
        self.dataset.mixing.check(own)
        return Taught(self.dataset.bound(manifest), self.teacher, ProgramInputs(own, self.teacher.names), own)

    @property
    def broken(self) -> Mapping[str, str]:
        return self.dataset.broken

    def class_numbers(self) -> np.ndarray | None:
        return self.dataset.class_numbers()

    def augmented(self, seed: int, epoch: int) -> Dataset:
        return Taught(self.dataset.augmented(seed, epoch), self.teacher, self.inputs, self.program)

    def take(self, rows: Rows) -> Batch:
        """Samples as the inputs of the program."""
        if self.inputs is None:
            raise ArgumentError("Data with a teacher are read by a program: pass them to a Trainer or a Loader.")
        batch = self.inputs(self.dataset.take(rows))
        if self.dataset.mixing.drawn and self.program is not None:  # the teacher sees the mixed samples
            batch = self.dataset.mixing(batch, self.program, first_of(rows))
        data = {port.name: batch[port.name] for port in self.inputs.data}
        return {**batch, self.teacher.name: self.teacher(data)}

    def describe(self) -> dict[str, Any]:
        return {**self.dataset.describe(), "teacher": self.teacher.file}


@typed_errors
def with_teacher(
    data: DataLike,
    teacher: AnyModel,
    *,
    output: str | None = None,
    name: str = "teacher",
    names: Mapping[str, str] | None = None,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Dataset:
    """Add the logits of a teacher to every batch, for the loss `onnx_convgrad.losses.distillation`.

    The teacher runs in inference mode on the same numbers as the program, after any augmentation. A Softmax at its end is
    left out, or undone. A fixed batch size of the teacher is kept by running it several times.

    Args:
        data: A data set, arrays by name, a file or a folder of images.
        teacher: The path of an ONNX file, or a model.
        output: The teacher's output with the logits, if it has several.
        name: The input of the program that takes them.
        names: Input of the program -> name of its array, for inputs that cannot be matched automatically.
        providers: Of the teacher, as in `onnxruntime.InferenceSession`.
        options: Session options of the teacher.

    Raises:
        ArgumentError: The data have no random access, or an output is unknown.
        ModelError: The teacher cannot be read.
    """
    dataset = as_dataset(data)
    if dataset is None:
        raise ArgumentError(
            f"A teacher needs arrays, a file or a folder of images, not {type(data).__name__}.",
            hint="Add its logits to batches of your own, as an array of the name of the input.",
        )
    made = Teacher(teacher, output=output, name=name, names=names, providers=providers, options=options)
    return made.teaching(dataset)
