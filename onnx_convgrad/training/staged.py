"""Run a graph in stages, between which the ranks exchange numbers: see `programs.exchanges`.

A stage holds the nodes that depend on the same number of exchanges one after another, and the exchanges that all of them
wait for are made in one sum over the ranks. The ranks exchange in float64, so the order of the ranks costs no digits.

`training.overlap` divides a graph by the gradients that get ready instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.programs.exchanges import Exchange, Exchanges
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.training.buffers import Roles


@dataclass(slots=True)
class Stage:
    """One stage: its session (untyped), inputs, outputs, the exchanges after it, and the values that nothing reads later."""

    session: Any
    inputs: list[str]
    outputs: list[str]
    exchanges: list[Exchange]
    done: list[str]


class GraphInStages:
    """A graph in stages, called like a `BoundGraph`.

    Args:
        model: The graph.
        groups: The nodes of each stage; none reads what a later group makes.
        roles: The buffers that it reads and writes.
        open_session: Creates the session of a stage.
        exchanges: Numbers that the ranks exchange between stages.

    Attributes:
        optional: Outputs that are computed only if they are asked for.
    """

    def __init__(
        self,
        model: ir.Model,
        groups: Sequence[Sequence[ir.Node]],
        roles: Roles,
        open_session: Callable[[ir.Model], Any],
        exchanges: Sequence[Exchange] = (),
    ) -> None:
        self.stages = _stages(model, groups, open_session, exchanges)
        self.buffers, self.reads, self.writes = roles
        self.optional = {v.name or "" for v in model.graph.outputs} - {x.own for x in exchanges} - set(self.writes)
        outputs = {name for stage in self.stages for name in stage.outputs}
        self.groups = tuple(dict.fromkeys(self.buffers.groups[v] for k, v in self.writes.items() if k in outputs))

    def __call__(self, feeds: Mapping[str, Any], results: Sequence[str], keep: Collection[str] = ()) -> dict[str, Any]:
        """Run on OrtValues, swap the written groups except those to `keep`, and return some results."""
        values = dict(feeds)
        for number, stage in enumerate(self.stages):
            try:
                self._run(stage, values, results)
            except Exception as problem:
                raise ExecutionError(f"ONNX Runtime could not run the program: {problem}") from problem
            self._between(number, values)
            for name in stage.done:
                if name not in results:
                    values.pop(name, None)
        self.buffers.swap(group for group in self.groups if group not in keep)
        return {name: values[name].numpy()[()] for name in results}

    def _between(self, number: int, values: dict[str, Any]) -> None:
        """Work between a stage and the next."""

    def _run(self, stage: Stage, values: dict[str, Any], results: Sequence[str]) -> None:
        binding, buffers = stage.session.io_binding(), self.buffers
        for name in stage.inputs:
            value = values[name] if name in values else buffers.current(self.reads[name])
            binding.bind_ortvalue_input(name, value)
        kept = [name for name in stage.outputs if name not in self.optional or name in results]
        own = {exchange.own for exchange in stage.exchanges}
        for name in kept:
            if name in self.writes:
                binding.bind_ortvalue_output(name, buffers.spare(self.writes[name]))
            elif name in results or name in own:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_output(name, *buffers.device)
        stage.session.run_with_iobinding(binding)
        values |= dict(zip(kept, binding.get_outputs(), strict=True))


class StagedGraph(GraphInStages):
    """A graph in stages, between which the ranks exchange numbers. Other arguments as for `GraphInStages`.

    Args:
        ranks: The ranks.

    Attributes:
        share: Input with the share of this rank's loss in that of all.
    """

    def __init__(self, model: ir.Model, roles: Roles, ranks: Ranks, open_session: Callable[[ir.Model], Any]) -> None:
        exchanges = Exchanges.read(model)
        self.ranks, self.share = ranks, exchanges.share
        groups = _at_exchanges(model.graph, exchanges.members)
        super().__init__(model, groups, roles, open_session, exchanges.members)

    def idle(self) -> None:
        """Take part in the exchanges without any samples."""
        for stage in self.stages:
            self._exchange(stage.exchanges, [np.zeros(exchange.size) for exchange in stage.exchanges])

    def _between(self, number: int, values: dict[str, Any]) -> None:
        exchanges = self.stages[number].exchanges
        totals = self._exchange(exchanges, [values[exchange.own].numpy() for exchange in exchanges])
        make = import_runtime().OrtValue.ortvalue_from_numpy
        values |= {x.total: make(array) for x, array in zip(exchanges, totals, strict=True)}

    def _exchange(self, exchanges: Sequence[Exchange], own: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The numbers of all ranks, of the dtypes of this rank's own."""
        if not exchanges:
            return []
        with np.errstate(all="ignore"):  # with a loss scale, some steps overflow
            sums = [_sums(array) if x.kind == "moments" else array for x, array in zip(exchanges, own, strict=True)]
            flat = np.concatenate(sums).astype(np.float64)
            self.ranks.all_reduce(flat)
            totals = np.split(flat, np.cumsum([array.size for array in own])[:-1])
            return [
                (_moments(total) if x.kind == "moments" else total).astype(array.dtype)
                for x, total, array in zip(exchanges, totals, own, strict=True)
            ]


def _at_exchanges(graph: ir.Graph, exchanges: Sequence[Exchange]) -> list[list[ir.Node]]:
    """Divide the nodes of a graph at its exchanges."""
    level = _levels(graph, exchanges)
    groups: list[list[ir.Node]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    for node in graph:
        groups[max((level[v] for v in node.outputs), default=0)].append(node)
    return groups


def _stages(
    model: ir.Model,
    groups: Sequence[Sequence[ir.Node]],
    open_session: Callable[[ir.Model], Any],
    exchanges: Sequence[Exchange],
) -> list[Stage]:
    """Make a stage of each group of nodes that makes anything for others."""
    graph = model.graph
    read_by: dict[ir.Value, int] = {}
    for number, nodes in enumerate(groups):
        read_by.update((v, number) for node in nodes for v in _operands(node))
    given, results = set(graph.inputs), set(graph.outputs)
    found = []
    for number, nodes in enumerate(groups):
        made = dict.fromkeys(v for node in nodes for v in node.outputs)
        used = dict.fromkeys(v for node in nodes for v in _operands(node))
        inputs = [v for v in used if v in given or (v not in made and v.producer() is not None)]
        outputs = [v for v in made if v in results or read_by.get(v, 0) > number]
        if not outputs:
            continue
        part = ir.Model(extract(graph, inputs, outputs), ir_version=model.ir_version)
        reads, makes = ([v.name or "" for v in values] for values in (inputs, outputs))
        own = [x for x in exchanges if x.own in makes]
        done = [v.name or "" for v in read_by if read_by[v] == number and v not in graph.outputs]
        found.append(Stage(open_session(part), reads, makes, own, done))
    return found


def _levels(graph: ir.Graph, exchanges: Sequence[Exchange]) -> dict[ir.Value, int]:
    """Value -> the number of exchanges, one after another, that it depends on."""
    level = dict.fromkeys(graph.inputs, 0)
    inputs = {v.name: v for v in graph.inputs}
    outputs = {v.name: v for v in graph.outputs}
    while True:
        for node in graph:
            level.update(dict.fromkeys(node.outputs, max((level.get(v, 0) for v in _operands(node)), default=0)))
        late = [x for x in exchanges if level[inputs[x.total]] <= level[outputs[x.own]]]
        if not late:
            return level
        level.update((inputs[x.total], level[outputs[x.own]] + 1) for x in late)


def _operands(node: ir.Node) -> list[ir.Value]:
    return [v for v in (*node.inputs, *captured_values(node)) if v is not None]


def _sums(own: np.ndarray) -> np.ndarray:
    """From means, variances and the number of entries to the sums of entries and of their squares."""
    mean, var = np.split(own[:-1].astype(np.float64), 2)
    count = float(own[-1])
    return np.concatenate([count * mean, count * (var + mean**2), [count]])


def _moments(sums: np.ndarray) -> np.ndarray:
    """The inverse of `_sums`."""
    count = max(sums[-1], 1.0)
    mean, square = np.split(sums[:-1] / count, 2)
    return np.concatenate([mean, np.maximum(square - mean**2, 0), [sums[-1]]])
