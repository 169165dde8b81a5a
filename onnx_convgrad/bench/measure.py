"""Measure a model and its gradients on this machine: as a whole, and each convolution by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.limits import machine_bytes
from onnx_convgrad.base.progress import announce
from onnx_convgrad.bench.layer import OPERATORS, check_timed, forward, gradients
from onnx_convgrad.bench.profile import LayerTimes, profile
from onnx_convgrad.bench.timing import Bound, Budget, Side, Turns, interleave, machine
from onnx_convgrad.bench.torch_side import TorchSide
from onnx_convgrad.checking.random_inputs import Feed, draw, working_feed
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.load import load, reshaped
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.notes import DERIVATIVE_INPUTS
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import session

_TORCH = "PyTorch"

_SAME = 1.05
"""Largest ratio of two times that count as equal."""

DEPTHS = ("model", "layers", "lowerings")
"""Depths of a measurement: the whole model, each layer too, or each lowering of each layer too."""

_SPATIAL = {3: (1024, 256, 64), 4: (224, 64, 32), 5: (32, 16)}
"""Sizes tried for free spatial axes, by the rank of the input: typical ones, larger than those of a check."""


@dataclass(frozen=True)
class ConvTimes:
    """Seconds by lowering, predicted and measured, of one operator on one geometry, for all nodes that share it.

    `skipped` is the reason if nothing was measured, `complete` whether every lowering that fits into memory was.
    """

    nodes: tuple[str, ...]
    operator: str
    geometry: str
    chosen: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    torch: float | None = None
    skipped: str = ""
    complete: bool = False

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
    """Seconds of the model (`forward`), of the model with its gradients (`augmented`), of its layers and convolutions.

    All but `forward` may be missing. `distinct` is the number of convolutions to be timed, and `interrupted` whether Ctrl-C
    ended the measurement.
    """

    inputs: Mapping[str, tuple[int, ...]]
    machine: Mapping[str, Any]
    forward: float
    augmented: float | None
    convolutions: tuple[ConvTimes, ...] = ()
    torch: bool = False
    layers: tuple[LayerTimes, ...] = ()
    distinct: int = 0
    interrupted: bool = False

    @property
    def backward(self) -> float | None:
        """Time that the gradients add; less than they take, if the runtime fuses fewer of the model's nodes."""
        return None if self.augmented is None else self.augmented - self.forward

    @property
    def untimed(self) -> int:
        """Number of convolutions for which there was no time."""
        return self.distinct - len(self.convolutions)

    @property
    def incomplete(self) -> int:
        """Number of timed convolutions with lowerings for which there was no time."""
        return sum(not times.complete and not times.skipped for times in self.convolutions)

    @property
    def totals(self) -> tuple[float, float] | None:
        """Our seconds and PyTorch's of all nodes that were timed on both sides; `None` if there are none."""
        both = [(c.seconds * len(c.nodes), c.torch * len(c.nodes)) for c in self.convolutions if c.seconds and c.torch]
        return (sum(ours for ours, _ in both), sum(torch for _, torch in both)) if both else None

    @property
    def regret(self) -> float | None:
        """The time of the model with its gradients over what it would be with the fastest lowerings.

        Convolutions count with every lowering timed; `None` if there are none. Timed alone they may seem to lose more than
        the model takes: at most half of it counts.
        """
        timed = [c for c in self.convolutions if c.seconds and c.complete]
        if not timed or self.augmented is None:
            return None
        lost = sum((c.seconds - c.measured[c.fastest]) * len(c.nodes) for c in timed if c.seconds)
        return self.augmented / (self.augmented - min(lost, self.augmented / 2))

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
            "regret": self.regret,
            "interrupted": self.interrupted,
            "layers": [asdict(layer) for layer in self.layers],
            "untimed": self.untimed,
            "incomplete": self.incomplete,
            "convolutions": [{**asdict(c), "seconds": c.seconds, "fastest": c.fastest} for c in self.convolutions],
        }


def bench(
    model: AnyModel,
    options: Options,
    *,
    threads: int,
    repeats: int = 5,
    torch: bool = True,
    depth: str = DEPTHS[-1],
    budget: Budget | None = None,
) -> BenchReport:
    """Measure a model on ONNX Runtime's CPU provider; free sizes of its inputs are found by trial.

    Each time is the median of `repeats` turns, or of as many as the budget allows. The whole model comes first, then each
    layer, then the convolutions by their predicted share of the time, first with the chosen lowering, then with all: as far
    as `depth`, one of `DEPTHS`. With `torch`, PyTorch's convolutions, which need an installed PyTorch, are timed too. Ctrl-C
    ends the measurement once the model itself has been timed; the report has what was measured until then.

    Raises:
        ModelError: No inputs were found on which the model runs.
        ConvGradError: An error of `augment`.
    """
    budget = budget or Budget()
    announce("building")
    loaded = load(model)
    options = replace(options, compare=depth == DEPTHS[-1])
    built = build(loaded, options)
    announce("finding inputs")
    feed, results = working_inputs(built)
    shapes = {name: array.shape for name, array in feed.items()}
    if any(v.shape is None or not v.shape.is_static() for v in built.primal.graph.inputs):
        announce("building for these inputs")
        sizes = {name: list(shape) for name, shape in shapes.items()}
        built = build(reshaped(loaded, sizes), options)
    announce("timing the model")
    whole = budget.part(_WHOLE if options.compare else 1.0)
    forward = Turns(Bound(built.primal, feed, threads), budget=whole)
    report = BenchReport(shapes, machine(threads), forward(), None, torch=torch)
    try:
        announce("timing the model with its gradients")
        full = feed | cotangent_values(built, feed, results)
        augmented = Turns(Bound(built.model, full, threads), budget=whole)
        seconds = interleave({"forward": forward, "augmented": augmented}, repeats=repeats, budget=whole)
        del forward, augmented
        report = replace(report, forward=seconds["forward"], augmented=seconds["augmented"])
        if depth != DEPTHS[0] and budget.left:
            announce("timing each layer")
            report = replace(
                report, layers=profile(built.primal, built.model, full, threads, budget=budget.part(_WHOLE))
            )
        if options.compare:
            groups = _grouped(built)
            report = replace(report, distinct=len(groups))
            for found in _convolutions(groups, budget, threads, repeats, torch=torch):
                report = replace(report, convolutions=found)
    except KeyboardInterrupt:
        report = replace(report, interrupted=True)
    return report


_WHOLE, _CHOSEN = 0.4, 0.4
"""The share of the time left for the whole model, if its convolutions are timed, too, and for their chosen lowerings."""


def working_inputs(built: Built) -> tuple[Feed, Mapping[str, np.ndarray]]:
    """Inputs on which the model runs, and its results."""
    rank = max((len(v.shape) for v in built.primal.graph.inputs if v.shape is not None), default=4)
    opened = cache(lambda: session(built.primal))

    def run(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [output.name for output in opened().get_outputs()]
        return dict(zip(names, opened().run(names, dict(feed)), strict=True))

    return working_feed(list(built.primal.graph.inputs), run, spatial=_SPATIAL.get(rank, _SPATIAL[4]))


def cotangent_values(built: Built, feed: Feed, results: Mapping[str, np.ndarray]) -> Feed:
    """Random values for the inputs that the gradients add: cotangents have the shapes of the model's `results`."""
    added = [v for v in built.model.graph.inputs if v.name not in feed and not v.is_initializer()]
    values = {name: y for y, name in json.loads(built.model.metadata_props[DERIVATIVE_INPUTS]).items()}
    rng = np.random.default_rng(1)
    cotangents: Feed = {}
    for value in added:
        name = value.name or ""
        like = results.get(values.get(name, ""))
        cotangents |= (
            draw([value], {}, 1) if like is None else {name: rng.standard_normal(like.shape).astype(like.dtype)}
        )
    return cotangents


def _convolutions(
    groups: Sequence[_Group], budget: Budget, threads: int, repeats: int, *, torch: bool
) -> Iterator[tuple[ConvTimes, ...]]:
    """Time the groups by their predicted share, first the chosen lowerings, then all; give what there is after each one."""
    found: dict[int, ConvTimes] = {}
    order = sorted(range(len(groups)), key=lambda index: -groups[index].predicted)
    with ExitStack() as stack:
        side = stack.enter_context(TorchSide(threads)) if torch and groups else None
        for every, limit in ((False, budget.part(_CHOSEN)), (True, budget)):
            for place, index in enumerate(order):
                if not budget.left:
                    return
                if every and found[index].complete:
                    continue
                first = groups[index].choices[0]
                what = "all lowerings of convolution" if every else "convolution"
                announce(f"timing {what} {place + 1} of {len(groups)}: {first.op_type} of {first.node}")
                turn = limit.part(1 / (len(groups) - place))
                found[index] = _times(groups[index], side, threads, repeats, every=every, budget=turn)
                yield tuple(found[i] for i in sorted(found))


@dataclass(frozen=True)
class _Group:
    """Choices with the same operator and geometry, the dtype of the data, and whether the weights are constant."""

    choices: list[Choice]
    dtype: ir.DataType | None
    constant: bool

    @property
    def predicted(self) -> float:
        """Predicted seconds of all choices together."""
        choice = self.choices[0]
        return len(self.choices) * predicted(choice).get(choice.chosen, 0.0)


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


def _times(
    group: _Group, torch: TorchSide | None, threads: int, repeats: int, *, every: bool, budget: Budget
) -> ConvTimes:
    """Time the chosen lowering of a group, or all of them, if there is time for `every` one."""
    choice = group.choices[0]
    times = ConvTimes(
        tuple(c.node for c in group.choices), choice.op_type, str(choice.spec), choice.chosen, predicted(choice), {}
    )
    if group.dtype not in (ir.DataType.FLOAT, None):
        why = f"its dtype is {group.dtype.name.lower()}, and only float32 is timed"
        return replace(times, skipped=why, complete=True)
    try:
        check_timed(choice.spec)
    except ArgumentError as problem:
        return replace(times, skipped=str(problem), complete=True)
    others = {_TORCH: torch.side(choice.spec, OPERATORS[choice.op_type], budget)} if torch else {}
    measured = time_lowerings(choice, threads, repeats, others, constant=group.constant, every=every, budget=budget)
    complete = len(fitting(choice)) == len(measured.keys() - others)
    seconds = measured.pop(_TORCH, None)
    return replace(times, geometry=choice.spec.brief, torch=seconds, measured=measured, complete=complete)


# -- one convolution ---------------------------------------------------------------------------------------------------

_NEAR = 2.5
"""Factor of the fastest time within which lowerings are timed again, more carefully."""

_ROOM = 0.3
"""Most of the machine's memory that a lowering may use: while its arena grows, the runtime uses twice as much."""


def predicted(choice: Choice) -> dict[str, float]:
    """Return the predicted seconds of every lowering that applies."""
    return {c.name: c.seconds for c in choice.candidates if c.seconds is not None}


def fitting(choice: Choice) -> list[str]:
    """The lowerings that apply to a convolution and fit into memory, the chosen one first, then by predicted time."""
    room, seconds = _ROOM * machine_bytes(), predicted(choice)
    names = [c.name for c in choice.candidates if c.name in seconds and (c.name == choice.chosen or c.workspace < room)]
    return sorted(names, key=lambda name: (name != choice.chosen, seconds[name]))


def time_lowerings(
    choice: Choice,
    threads: int,
    repeats: int,
    others: Mapping[str, Side] | None = None,
    *,
    constant: bool = False,
    every: bool = True,
    budget: Budget | None = None,
) -> dict[str, float]:
    """Time the chosen lowering, or `every` one that applies to a convolution and fits into memory, and `others`.

    `constant` says that the weights are, so that nodes that depend on them alone are folded.
    All are first timed roughly, one after the other, while the budget lasts; then the fast ones, the chosen one and the
    others in turns. Returns seconds.
    """
    budget = budget or Budget()

    def run(lowering: str) -> Bound:
        spec, operator = choice.spec, choice.op_type
        if not OPERATORS[operator]:
            return forward(spec, threads, lowering)
        return gradients(spec, OPERATORS[operator], threads, {operator: lowering}, constant=constant)

    rough: dict[str, float] = {}
    for name in fitting(choice) if every else [choice.chosen]:
        if rough and not budget.left:
            break
        turns = Turns(run(name), tries=3, budget=budget)
        rough[name] = turns()
        del turns  # a session never releases memory
    bound = _NEAR * min(rough.values())
    near = [name for name, seconds in rough.items() if name == choice.chosen or seconds < bound]
    careful: dict[str, Side] = {}
    for name in near if budget.left else ():
        careful[name] = Turns(run(name), budget=budget)
    return rough | interleave({**careful, **(others or {})}, repeats=repeats, budget=budget)
