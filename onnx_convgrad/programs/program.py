"""Training programs: graphs with which any ONNX Runtime trains a model.

`step` is one whole training step in one graph. `gradients` and `update` are its two halves, for accumulation over several
batches or several machines, `evaluate` is the forward pass in inference mode with the loss, and `inference` the original
model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.programs.graph_names import GraphName
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.optim.schedules import Schedule, schedule_from
from onnx_convgrad.programs.storage import Parts, read_manifest, write_program


class TrainingProgram:
    """The graphs of a training program, and the manifest with the roles of their inputs and outputs.

    Parameters, state and learning rate have the stored values as defaults, so that `step` runs with data and labels alone.
    Feed each `next` output to the input that it updates in the following step.

    Args:
        source: Builds a graph of the program from its name.

    Attributes:
        manifest: The roles of all names.
        schedule: Number of finished steps -> learning rate; `None` in a loaded program with a schedule of a custom class.
        term_schedules: Input with the weight of a term -> its schedule, or `None` likewise.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Callable[[GraphName], ir.Model],
        schedule: Schedule | None = None,
        term_schedules: Sequence[Schedule] = (),
    ) -> None:
        self.manifest = manifest
        self.schedule = schedule or schedule_from(manifest.optimizer["schedule"])
        scheduled = [term["schedule"] for term in manifest.losses if term.get("weight_input")]
        self.term_schedules = dict(
            zip(manifest.term_weights, term_schedules or map(schedule_from, scheduled), strict=True)
        )
        self._source = source
        self._models: dict[GraphName, ir.Model] = {}

    @typed_errors
    def model(self, part: GraphName) -> ir.Model:
        """A graph as an onnx_ir model, built on first use; weights are shared with the other graphs.

        Args:
            part: `"step"`, `"gradients"`, `"update"`, `"evaluate"` or `"inference"`; with `sync_batchnorm` also
                `"synchronized"`. For batches that are joined, `"counts"` and `"shared"`, where the loss needs them:
                the numbers that divide its summands, and gradients with the share of a batch in each of them.
        """
        check_names([part], self.manifest.graphs(), "part")
        if part not in self._models:
            self._models[part] = self._source(part)
        return self._models[part]

    def frozen(self) -> dict[str, Port]:
        """The weights and running statistics that are not trained, by name."""
        stored = self.model("evaluate").graph.initializers
        return {name: Port.from_value(stored[name]) for name in self.manifest.frozen if name in stored}

    @cached_property
    def step(self) -> onnx.ModelProto:
        """data, labels, learning_rate, parameters, state -> loss, outputs, next parameters, next state."""
        return whole_proto(self.model("step"))

    @cached_property
    def gradients(self) -> onnx.ModelProto:
        """data, labels, parameters, statistics -> loss, outputs, gradients, next statistics."""
        return whole_proto(self.model("gradients"))

    @cached_property
    def update(self) -> onnx.ModelProto:
        """learning_rate, parameters, gradients, optimizer state -> next parameters, next optimizer state."""
        return whole_proto(self.model("update"))

    @cached_property
    def evaluate(self) -> onnx.ModelProto:
        """data, labels, parameters, statistics -> loss, outputs, in inference mode."""
        return whole_proto(self.model("evaluate"))

    @cached_property
    def inference(self) -> onnx.ModelProto:
        """The original model, in inference mode."""
        return whole_proto(self.model("inference"))

    @typed_errors
    def save(
        self, folder: str | os.PathLike[str], *, shared_weights: bool = False, defaults: bool | None = None
    ) -> None:
        """Write `step.onnx`, `gradients.onnx`, `update.onnx`, `evaluate.onnx`, `inference.onnx` and `manifest.json`.

        With `sync_batchnorm`, also `synchronized.onnx`, which needs `onnx_convgrad` to run; and `counts.onnx` and
        `shared.onnx` for losses that need them to join batches.

        Writing is atomic.

        Args:
            folder: The folder; a program in it is replaced.
            shared_weights: Write the weights once, to `weights.bin`, instead of into each file; always so above 2 GB.
            defaults: Whether parameters, state and learning rate have default values. JavaScript cannot feed inputs with
                defaults; without them, the initial values are the outputs of one more file, `initial.onnx`. True by
                default, except with `target="web"`.

        Raises:
            ArgumentError: The folder holds something else.
            ModelError: It cannot be written.
        """
        models: dict[str, ir.Model] = {part: self.model(part) for part in self.manifest.graphs()}
        if defaults is None:
            defaults = self.manifest.options.get("target") != "web"
        write_program(
            as_path(folder, "The folder of a program"), self.manifest, models, shared=shared_weights, defaults=defaults
        )

    @classmethod
    @typed_errors
    def load(cls, folder: str | os.PathLike[str]) -> TrainingProgram:
        """Load a program that `save` wrote; its graphs are read on first use.

        Args:
            folder: The folder that `save` wrote.

        Raises:
            ModelError: The folder holds no program, or one of a later version.
        """
        path = as_path(folder, "The folder of a program")
        manifest = read_manifest(path)
        try:
            return cls(manifest, Parts(path, manifest))
        except ArgumentError as problem:
            raise ModelError(
                f"The schedule in the manifest of {str(path)!r} cannot be used: {problem.message}",
                hint="Save the program again with TrainingProgram.save.",
            ) from None

    def __repr__(self) -> str:
        m = self.manifest
        count = sum(math.prod(p.static_shape()) for p in m.parameters)
        name = m.optimizer.get("name")
        return f"<TrainingProgram: {len(m.parameters)} parameters of {count:,} numbers, {name}, loss {m.loss!r}>"
