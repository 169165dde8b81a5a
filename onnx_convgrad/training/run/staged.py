"""Run a graph in stages, between which the ranks exchange numbers: see `training.program.exchanges`.

A stage holds the nodes that depend on the same number of exchanges one after another, and the exchanges that all of them
wait for are made in one sum over the ranks. The ranks exchange in float64, so the order of the ranks costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.training.program.exchanges import Exchange, Exchanges
from onnx_convgrad.training.run.buffers import Buffers


@dataclass(slots=True)
class Stage:
    """One stage: its session (untyped), inputs, outputs, the exchanges after it, and the values that nothing reads later."""

    session: Any
    inputs: list[str]
    outputs: list[str]
    exchanges: list[Exchange]
    done: list[str]


class StagedGraph:
    """A graph in stages, called like a `BoundGraph`.

    Args:
        model: The graph.
        buffers: The buffers.
        reads: Input -> name in `buffers`.
        writes: Output -> name in `buffers`.
        ranks: The ranks.
        open_session: Creates the session of a stage.

    Attributes:
        share: Input with the share of this rank's loss in that of all.
    """

    def __init__(
        self,
        model: ir.Model,
        buffers: Buffers,
        reads: Mapping[str, str],
        writes: Mapping[str, str],
        ranks: Ranks,
        open_session: Callable[[ir.Model], Any],
    ) -> None:
        self.buffers, self.reads, self.writes, self.ranks = buffers, reads, writes, ranks
        exchanges = Exchanges.read(model)
        outputs = [v.name or "" for v in model.graph.outputs]
        self.own = {x.own for x in exchanges.members}
        self.optional = set(outputs) - self.own - set(writes)
        self.share = exchanges.share
        self.stages = stages(model, exchanges.members, open_session)
        self.groups = tuple(dict.fromkeys(buffers.groups[v] for k, v in writes.items() if k in outputs))

    def __call__(self, feeds: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        """Run on OrtValues, together with the other ranks; swap the written groups, and return some results."""
        values = dict(feeds)
        for stage in self.stages:
            try:
                self._run(stage, values, results)
            except Exception as problem:
                raise ExecutionError(f"ONNX Runtime could not run the program: {problem}") from problem
            own = [values[exchange.own].numpy() for exchange in stage.exchanges]
            totals = self._exchange(stage.exchanges, own)
            make = import_runtime().OrtValue.ortvalue_from_numpy
            values |= {x.total: make(array) for x, array in zip(stage.exchanges, totals, strict=True)}
            for name in stage.done:
                if name not in results:
                    values.pop(name, None)
        self.buffers.swap(self.groups)
        return {name: _plain(values[name].numpy()) for name in results}

    def idle(self) -> None:
        """Take part in the exchanges without any samples."""
        for stage in self.stages:
            self._exchange(stage.exchanges, [np.zeros(exchange.size) for exchange in stage.exchanges])

    def _run(self, stage: Stage, values: dict[str, Any], results: Sequence[str]) -> None:
        binding, buffers = stage.session.io_binding(), self.buffers
        for name in stage.inputs:
            value = values[name] if name in values else buffers.current(self.reads[name])
            binding.bind_ortvalue_input(name, value)
        kept = [name for name in stage.outputs if name not in self.optional or name in results]
        for name in kept:
            if name in self.writes:
                binding.bind_ortvalue_output(name, buffers.spare(self.writes[name]))
            elif name in results or name in self.own:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_output(name, *buffers.device)
        stage.session.run_with_iobinding(binding)
        values |= dict(zip(kept, binding.get_outputs(), strict=True))

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


def stages(model: ir.Model, exchanges: Sequence[Exchange], open_session: Callable[[ir.Model], Any]) -> list[Stage]:
    """Divide a graph at its exchanges."""
    graph = model.graph
    level = _levels(graph, exchanges)
    by_name = {value.name or "": value for value in level}
    last = max(level.values(), default=0)
    members: list[list[ir.Node]] = [[] for _ in range(last + 1)]
    for node in graph:
        members[max((level[v] for v in node.outputs), default=0)].append(node)
    read_by: dict[ir.Value, int] = {}
    for number, nodes in enumerate(members):
        read_by.update((v, number) for node in nodes for v in _operands(node))
    given, results = set(graph.inputs), set(graph.outputs) | {by_name[x.own] for x in exchanges}
    found = []
    for number, nodes in enumerate(members):
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


def _plain(array: np.ndarray) -> Any:
    return array if array.ndim else array[()]
