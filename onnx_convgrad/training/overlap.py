"""Add up gradients over all ranks while the backward pass goes on, as PyTorch's DistributedDataParallel does.

The graph of the gradients is divided into stages. After each, a thread adds up the gradients that no later stage changes.
See Li et al., "PyTorch Distributed" (2020), section 3.2.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.training.buffers import Roles
from onnx_convgrad.training.staged import GraphInStages

STAGES = 4
"""Number of stages. More would hide more of the sums, but ONNX Runtime keeps a copy of what passes between stages."""


class OverlappedGraph(GraphInStages):
    """A graph that tells after each stage which gradients are ready. Other arguments as for `GraphInStages`.

    Args:
        buckets: The outputs with gradients, in the order in which they get ready.
    """

    def __init__(
        self, model: ir.Model, buckets: Sequence[Sequence[str]], roles: Roles, open_session: Callable[[ir.Model], Any]
    ) -> None:
        self._ready: Callable[[int], None] | None = None
        self._before = 0
        super().__init__(model, _groups(model.graph, buckets), roles, open_session)
        made = {name: number for number, stage in enumerate(self.stages) for name in stage.outputs}
        self._last = [max(made[name] for name in bucket) for bucket in buckets]

    def announce(self, ready: Callable[[int], None], before: int) -> None:
        """Let the run after `before` others call `ready` with the number of each bucket once its gradients are ready."""
        self._ready, self._before = ready, before

    def __call__(self, feeds: Mapping[str, Any], results: Sequence[str], keep: Collection[str] = ()) -> dict[str, Any]:
        """Run the stages one after another, as any graph in stages; arguments as there."""
        found = super().__call__(feeds, results, keep)
        self._before -= 1
        return found

    def _between(self, number: int, values: dict[str, Any]) -> None:  # noqa: ARG002
        if self._ready is not None and self._before == 0:
            for bucket, last in enumerate(self._last):
                if last == number:
                    self._ready(bucket)


def in_buckets(graph: ir.Graph, names: Sequence[str], count: int = STAGES) -> list[list[str]]:
    """Divide outputs, in this order, into buckets of about the same number of bytes."""
    outputs = {v.name: v for v in graph.outputs}
    sizes = np.array([_bytes(outputs[name]) for name in names], np.float64)
    place = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1) * count
    buckets: list[list[str]] = [[] for _ in range(count)]
    for name, number in zip(names, place, strict=True):
        buckets[min(int(number), count - 1)].append(name)
    return [bucket for bucket in buckets if bucket]


def _groups(graph: ir.Graph, buckets: Sequence[Sequence[str]]) -> list[list[ir.Node]]:
    """The nodes that each bucket needs besides those of the buckets before it, and then all others."""
    group: dict[ir.Node, int] = {}
    outputs = {v.name: v for v in graph.outputs}
    for number, bucket in enumerate(buckets):
        stack = [outputs[name].producer() for name in bucket]
        while stack:
            node = stack.pop()
            if node is not None and node not in group:
                group[node] = number
                stack += [v.producer() for v in (*node.inputs, *captured_values(node)) if v is not None]
    members: list[list[ir.Node]] = [[] for _ in range(len(buckets) + 1)]
    for node in graph:
        members[group.get(node, len(buckets))].append(node)
    return members


def _bytes(value: ir.Value) -> int:
    shape = value.shape.numpy() if value.shape is not None and value.shape.is_static() else ()
    return int(np.prod(shape) * (value.dtype or ir.DataType.FLOAT).itemsize)


class Background:
    """Calls that a thread makes one after another.

    The thread does not keep the process from ending: a call that waits for another rank must not outlive an error here.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._waiting = 0
        threading.Thread(target=self._work, daemon=True, name="sums of gradients").start()

    def add(self, call: Callable[[], None]) -> None:
        """Make a call after those before it."""
        self._waiting += 1
        self._calls.put(call)

    def wait(self) -> None:
        """Wait for all calls; raise the error of the first that failed."""
        while self._waiting:
            problem = self._done.get()
            self._waiting -= 1
            if problem is not None:
                raise problem

    def _work(self) -> None:
        while True:
            try:
                self._calls.get()()
                self._done.put(None)
            except Exception as problem:  # noqa: BLE001  `wait` raises it
                self._done.put(problem)
