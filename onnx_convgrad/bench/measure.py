"""Measure a model and its gradients on this machine: as a whole, and each convolution by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.memory import machine_bytes
from onnx_convgrad.bench.layer import OPERATORS, ConvLayer
from onnx_convgrad.bench.timing import Bound, Side, Turns, interleave, machine
from onnx_convgrad.bench.torch_side import TorchSide
from onnx_convgrad.checking.random_inputs import Feed, draw, working_feed
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.notes import SEEDS
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import Built, build
from onnx_convgrad.runtime import run

Progress = Callable[[str], None]

_TORCH = "PyTorch"

_SAME = 1.05
"""Times that differ by less count as equal."""

_SPATIAL = {3: (1024, 256, 64), 4: (224, 64, 32), 5: (32, 16)}
"""Sizes tried for free spatial axes, by the rank of the input: typical ones, larger than those of a check."""


@dataclass(frozen=True)
class ConvTimes:
    """Seconds by lowering, predicted and measured, of one operator on one geometry, for all nodes that share it.

    `skipped` is the reason if nothing was measured.
    """

    nodes: tuple[str, ...]
    operator: str
    geometry: str
    chosen: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    torch: float | None = None
    skipped: str = ""

    @property
    def seconds(self) -> float | None:
        """Measured seconds of the chosen lowering."""
        return self.measured.get(self.chosen)

    @property
    def fastest(self) -> str:
        """The fastest lowering, or the chosen one if nothing was measured."""
        return min(self.measured, key=lambda name: self.measured[name], default=self.chosen)


@dataclass(frozen=True)
class BenchReport:
    """Seconds of the model (`forward`), of the model with its gradients (`augmented`), and of each convolution."""

    inputs: Mapping[str, tuple[int, ...]]
    machine: Mapping[str, Any]
    forward: float
    augmented: float
    convolutions: tuple[ConvTimes, ...]
    torch: bool

    @property
    def backward(self) -> float:
        """Time that the gradients add; less than they take, if the runtime fuses fewer of the model's nodes."""
        return self.augmented - self.forward

    @property
    def totals(self) -> tuple[float, float] | None:
        """Our seconds and PyTorch's of all nodes that were timed on both sides; `None` if there are none."""
        both = [(c.seconds * len(c.nodes), c.torch * len(c.nodes)) for c in self.convolutions if c.seconds and c.torch]
        return (sum(ours for ours, _ in both), sum(torch for _, torch in both)) if both else None

    @property
    def lowerings(self) -> dict[str, str]:
        """The fastest lowering of every operator and node, for `lowering=`; the chosen one if it is about as fast."""
        return {
            f"{times.operator}:{node}": times.chosen if times.seconds <= _SAME * times.measured[best] else best
            for times in self.convolutions
            if times.seconds and (best := times.fastest)
            for node in times.nodes
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data; times in seconds."""
        return {
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "machine": dict(self.machine),
            "forward": self.forward,
            "augmented": self.augmented,
            "backward": self.backward,
            "convolutions": [{**asdict(c), "seconds": c.seconds, "fastest": c.fastest} for c in self.convolutions],
        }


def bench(
    model: AnyModel,
    options: Options,
    *,
    threads: int,
    repeats: int = 5,
    torch: bool = True,
    progress: Progress = lambda _: None,
) -> BenchReport:
    """Measure a model on ONNX Runtime's CPU provider; free sizes of its inputs are found by trial.

    Each time is the median of `repeats` turns. With `torch`, PyTorch's convolutions, which need an installed PyTorch, are
    timed too.

    Raises:
        ModelError: No inputs were found on which the model runs.
        ConvGradError: What `augment` raises.
    """
    progress("finding inputs")
    feed = _feed(build(model, options))
    shapes = {name: array.shape for name, array in feed.items()}
    sizes = {name: list(shape) for name, shape in shapes.items()}
    built = build(model, replace(options, input_shapes=sizes), compare=True)
    progress("timing the model")
    forward, augmented = _whole(built, feed, threads, repeats)
    convolutions = []
    groups = _grouped(built)
    with ExitStack() as stack:
        side = stack.enter_context(TorchSide(threads)) if torch and groups else None
        for index, group in enumerate(groups, 1):
            first = group.choices[0]
            progress(f"timing convolution {index} of {len(groups)}: {first.op_type} of {first.node}")
            convolutions.append(_times(group, side, threads, repeats))
    return BenchReport(shapes, machine(threads), forward, augmented, tuple(convolutions), torch)


def _feed(built: Built) -> Feed:
    primal = whole_proto(built.primal)
    rank = max((len(v.shape) for v in built.primal.graph.inputs if v.shape is not None), default=4)
    sizes = _SPATIAL.get(rank, _SPATIAL[4])
    return working_feed(list(built.primal.graph.inputs), lambda feed: run(primal, feed), spatial=sizes)[0]


def _whole(built: Built, feed: Feed, threads: int, repeats: int) -> tuple[float, float]:
    """Time the model, and the model with its gradients."""
    seeds = [v for v in built.model.graph.inputs if v.name not in feed and not v.is_initializer()]
    results = run(whole_proto(built.primal), feed)
    targets = {seed: y for y, seed in json.loads(built.model.metadata_props[SEEDS]).items()}
    rng = np.random.default_rng(1)
    whole = {**feed}
    for value in seeds:
        name = value.name or ""
        like = results.get(targets.get(name, ""))
        if like is not None:
            whole[name] = rng.standard_normal(like.shape).astype(like.dtype)
        else:
            whole |= draw([value], {}, 1)
    sides: dict[str, Side] = {
        "forward": Turns(Bound(whole_proto(built.primal).SerializeToString(), feed, threads)),
        "augmented": Turns(Bound(whole_proto(built.model).SerializeToString(), whole, threads)),
    }
    seconds = interleave(sides, repeats=repeats)
    return seconds["forward"], seconds["augmented"]


@dataclass(frozen=True)
class _Group:
    """Choices with the same operator and geometry, the dtype of the data, and whether the weights are constant."""

    choices: list[Choice]
    dtype: ir.DataType | None
    constant: bool


def _grouped(built: Built) -> list[_Group]:
    """Group the choices to be timed, in the order of the model."""
    groups: dict[tuple[str, str, bool], _Group] = {}
    order = {node.name: i for i, node in enumerate(built.primal.graph)}
    operands = {node.name: (*node.inputs, None, None)[:2] for node in built.primal.graph}
    fed = {v.name for v in built.model.graph.inputs}
    for choice in sorted(built.choices, key=lambda c: order.get(c.node, len(order))):
        if choice.op_type in OPERATORS:
            data, weight = operands.get(choice.node, (None, None))
            constant = weight is not None and is_constant(weight) and weight.name not in fed
            group = _Group([], None if data is None else data.dtype, constant)
            groups.setdefault((str(choice.spec), choice.op_type, constant), group).choices.append(choice)
    return list(groups.values())


def _times(group: _Group, torch: TorchSide | None, threads: int, repeats: int) -> ConvTimes:
    choice = group.choices[0]
    facts: dict[str, Any] = {
        "nodes": tuple(c.node for c in group.choices),
        "operator": choice.op_type,
        "geometry": str(choice.spec),
        "chosen": choice.chosen,
        "predicted": predicted(choice),
    }
    if group.dtype not in (ir.DataType.FLOAT, None):
        return ConvTimes(
            **facts, measured={}, skipped=f"its dtype is {group.dtype.name.lower()}, and only float32 is timed"
        )
    try:
        layer = ConvLayer.of(choice.spec, constant=group.constant)
    except ArgumentError as problem:
        return ConvTimes(**facts, measured={}, skipped=str(problem))
    facts["geometry"] = str(layer)
    others = {_TORCH: torch.side(layer, OPERATORS[choice.op_type])} if torch else {}
    measured = time_lowerings(choice, layer, threads, repeats, others)
    return ConvTimes(**facts, torch=measured.pop(_TORCH, None), measured=measured)


# -- one convolution ---------------------------------------------------------------------------------------------------

_NEAR = 2.5
"""Lowerings within this factor of the fastest are timed again, more carefully."""

_ROOM = 0.3
"""Most of the machine's memory that a lowering may use: while its arena grows, the runtime uses twice as much."""


def predicted(choice: Choice) -> dict[str, float]:
    """Return the predicted seconds of every lowering that applies."""
    return {c.name: c.seconds for c in choice.candidates if c.seconds is not None}


def time_lowerings(
    choice: Choice, layer: ConvLayer, threads: int, repeats: int, others: Mapping[str, Side] | None = None
) -> dict[str, float]:
    """Time every lowering that applies to a convolution and fits into memory, and `others`; return seconds.

    All are first timed roughly, one after the other; then the fast ones, the chosen one and the others in turns.
    """
    rough = {}
    for candidate in choice.candidates:
        fits = candidate.name == choice.chosen or candidate.workspace < _ROOM * machine_bytes()
        if candidate.seconds is not None and fits:
            run = Turns(_run(choice.op_type, layer, candidate.name, threads), tries=3)
            rough[candidate.name] = run()
            del run  # a session never releases memory
    bound = _NEAR * min(rough.values())
    near = [name for name, seconds in rough.items() if name == choice.chosen or seconds < bound]
    careful: dict[str, Side] = {name: Turns(_run(choice.op_type, layer, name, threads)) for name in near}
    return rough | interleave({**careful, **(others or {})}, repeats=repeats)


def _run(op_type: str, layer: ConvLayer, lowering: str, threads: int) -> Bound:
    wrt = OPERATORS[op_type]
    return layer.ours(wrt, threads, {op_type: lowering}) if wrt else layer.forward(threads, lowering)
