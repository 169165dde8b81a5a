"""The state that the stages of a transformation pass on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import onnx
import onnx_ir as ir

from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.serialize import completed, whole_proto
from onnx_convgrad.ir.targets import TargetInfo, target_named
from onnx_convgrad.lowering.cost.calibration import calibrated
from onnx_convgrad.lowering.cost.node import NodePrices, worth_storing
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.budget import Fit, MemoryPlan
from onnx_convgrad.memory.recompute import Recomputation, Selection
from onnx_convgrad.pipeline.options import Names, Options

Mode = Literal["vjp", "grad", "jvp", "hvp"]


def target_of(options: Options) -> TargetInfo:
    """The target with the measured speeds of this machine, by which bodies store results."""
    asked = options.target
    target = calibrated(target_named(asked.name, deterministic=asked.deterministic))
    return replace(target, stored=partial(worth_storing, target.rates))


@dataclass(slots=True)
class Trials:
    """Results of the earlier builds of a model with a memory budget.

    Attributes:
        factor: Memory of a run over its prediction.
        tried: Results of plans, by the plan and whether loops store less; no plan is tried twice.
        lowered: Lowered copies, by whether loops store less, and then by the largest workspace and by the lowerings; `None`
            if no lowering has so small a workspace.
        prices: The prices of nodes on the target.
    """

    factor: float = 1.0
    tried: dict[tuple[MemoryPlan, bool], tuple[int, float] | None] = field(default_factory=dict)
    lowered: dict[bool, dict[Any, tuple[Built, Selection] | None]] = field(default_factory=dict)
    prices: NodePrices = field(default_factory=NodePrices)


@dataclass(slots=True)
class Built:
    """A model on its way through the stages, with what was asked for and what they decided.

    Attributes:
        model: The model, which each stage changes in place.
        options: The arguments of the transformation.
        target: The execution provider.
        primal: The canonical model before differentiation.
        loaded: The loaded model that it was made from, if there is one; of its canonical form, if nobody else needs that.
        mode: The transformation; `None` where the nodes come from elsewhere.
        forward: The nodes from before differentiation; without them nothing is recomputed.
        following: Output -> input that it may be written over with a memory budget.
        trials: What earlier builds of the model have shown.
        plan: How memory is saved.
        selection: The choice of what is recomputed, if a plan was searched; it shares nodes with copies of the model.
        mark: The node between the forward and the backward part of the lowered graph, if one is needed.
        gradients: Differentiated value -> graph output with its derivative.
        choices: The lowering of each abstract operator.
        recomputation: The values that are computed again, if that was requested.
        memory: The predicted memory, if there is a budget.
        checked: The proto that was verified: a `skeleton` of the model.
    """

    model: ir.Model
    options: Options
    target: TargetInfo
    primal: ir.Model
    loaded: Model | None = None
    mode: Mode | None = None
    forward: Collection[ir.Node] | None = None
    following: Mapping[str, str] = field(default_factory=dict)
    trials: Trials = field(default_factory=Trials, init=False)
    plan: MemoryPlan = field(init=False)
    selection: Selection | None = field(default=None, init=False)
    mark: ir.Node | None = field(default=None, init=False)
    gradients: dict[str, str] = field(default_factory=dict, init=False)
    choices: tuple[Choice, ...] = field(default=(), init=False)
    recomputation: Recomputation | None = field(default=None, init=False)
    memory: Fit | None = field(default=None, init=False)
    checked: onnx.ModelProto | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.plan = MemoryPlan(0.0, self.options.target.max_workspace, in_place=self.options.memory.budget is not None)

    @property
    def keeps_outputs(self) -> bool:
        """Whether the outputs of the model come before the derivatives."""
        return self.options.outputs and self.mode in ("vjp", "jvp")

    @property
    def recomputed(self) -> Names | float | None:
        """The values that are computed again, or the share of the predicted time that this may add."""
        return None if self.forward is None else self.plan.recompute or self.options.memory.recompute

    def emitter(self) -> Emitter:
        """An emitter that adds nodes at the end of the graph."""
        graph = self.model.graph
        return Emitter(
            graph, opsets=graph.opset_imports, target=self.target, joint=self.options.target.lowering != "exact"
        )

    def copy_under(self, plan: MemoryPlan) -> Built:
        """A copy on which a plan is tried, without the decisions."""
        model, before = cloned(self.model), set(self.forward or ())
        copies = zip(model.graph, self.model.graph, strict=True)
        copy = replace(self, model=model, forward=[new for new, old in copies if old in before])
        copy.plan = plan
        return copy

    def proto(self) -> onnx.ModelProto:
        """The model as a proto with all its weights, if they fit."""
        return whole_proto(self.model) if self.checked is None else completed(self.checked, self.model)
