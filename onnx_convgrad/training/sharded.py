"""Divide the optimizer's state among the ranks: each keeps and updates that of its own parameters.

Rajbhandari et al., "ZeRO" (2020), stage 1. Every rank computes the next values of its parameters and then gives them to the
others. The results have the same bits as those of an undivided update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.training.buffers import Buffers
from onnx_convgrad.training.engine import Arrays, Results
from onnx_convgrad.training.flat_buffers import FlatBuffers
from onnx_convgrad.training.parallel import ParallelEngine


class ShardedEngine(ParallelEngine):
    """An engine that holds the optimizer's state of this rank's parameters alone; arguments are those of `ParallelEngine`.

    All ranks must call `read` for optimizer state, which its owner gives to the others.
    """

    @cached_property
    def owners(self) -> dict[str, int]:
        """Rank of each parameter, in contiguous parts with about the same number of entries."""
        sizes = np.array([np.prod(p.static_shape()) for p in self.manifest.parameters], np.float64)
        middles = np.cumsum(sizes) - sizes / 2
        ranks = np.minimum(middles / max(sizes.sum(), 1) * self.ranks.size, self.ranks.size - 1).astype(int)
        return {p.name: int(rank) for p, rank in zip(self.manifest.parameters, ranks, strict=True)}

    @cached_property
    def _divided(self) -> dict[str, int]:
        """Rank of each state that one rank alone holds. All hold the averages of parameters, which they evaluate with."""
        return {s.name: self.owners[s.of] for s in self._states("optimizer") if s.of is not None and s.slot != "ema"}

    def held(self) -> list[str]:
        """The values that this rank holds."""
        rank = self.ranks.rank
        return [name for name in super().held() if self._divided.get(name, rank) == rank]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Arrays], rate: float, outputs: Sequence[str]) -> Results:
        """Update from several batches of every rank; then take the parameters that other ranks have updated."""
        results = super().step(batches, rate, outputs)
        for owner, names in self._given.items():
            flats = self._shown.get(owner)
            if flats is not None:
                arrays = flats[self._buffers.turn("update")].arrays
            else:  # on another device
                host = self._flat(names)
                for name, value in host.values.items():
                    value.numpy()[...] = self._buffers.current(name).numpy()
                arrays = host.arrays
            for array in arrays:
                self.ranks.broadcast(array, owner)
            if flats is None:
                self._buffers.write({name: value.numpy() for name, value in host.values.items()})
        return results

    @cached_property
    def _given(self) -> dict[int, list[str]]:
        """Rank -> the parameters and averages that it gives to the others."""
        values = {**self.owners, **{s.name: self.owners[s.of] for s in self.manifest.state if s.slot == "ema" and s.of}}
        return {rank: [n for n, owner in values.items() if owner == rank] for rank in sorted(set(values.values()))}

    def _model(self, run: Any) -> ir.Model:
        model = super()._model(run)
        return self._own_update(model) if run == "update" else model

    def _own_update(self, update: ir.Model) -> ir.Model:
        """The graph `update` for the parameters of this rank."""
        model, rank = update.clone(), self.ranks.rank
        owners = {**self.owners, **{s.name: self.owners[s.of] for s in self._states("optimizer") if s.of is not None}}
        other = {entry.next for entry in self.manifest.moving() if owners.get(entry.name, rank) != rank}
        kept = [value for value in model.graph.outputs if value.name not in other]
        model.graph.outputs.clear()
        model.graph.outputs.extend(kept)
        RemoveUnused()(model)
        rate = self.manifest.learning_rate.name  # is fed also where a rank has no parameters
        unused = [v for v in model.graph.inputs if not v.uses() and not v.is_graph_output()]
        for value in [v for v in unused if v.name != rate]:
            model.graph.inputs.remove(value)
            model.graph.initializers.pop(value.name or "", None)
        return model

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copy values from the device; those of other ranks are given by their owners."""
        wanted = list(names)
        found = self._buffers.read(name for name in wanted if name in self._buffers)
        ports = {entry.name: entry for entry in self.manifest.moving()}
        for name in wanted:
            if name in self._divided:
                array = np.array(found.get(name, np.zeros(ports[name].static_shape(), ports[name].dtype)), order="C")
                self.ranks.broadcast(array, self._divided[name])
                found[name] = array
        return {name: found[name] for name in wanted}

    def write(self, values: Arrays) -> None:
        """Replace values; those that other ranks hold are left to them."""
        super().write({name: array for name, array in values.items() if name in self._buffers})

    def _add_values(self, buffers: Buffers, start: Mapping[str, np.ndarray], group: str) -> None:
        start = {name: array for name, array in start.items() if name in set(self.held())}
        self._shown: dict[int, tuple[FlatBuffers, FlatBuffers]] = getattr(self, "_shown", {})
        if group == "update" and self._in_main_memory():
            for owner, names in self._given.items():
                self._shown[owner] = self._flat(names), self._flat(names)
                buffers.add_made((self._shown[owner][0].values, self._shown[owner][1].values), group)
            buffers.write({name: array for name, array in start.items() if name in buffers})
        super()._add_values(buffers, {name: array for name, array in start.items() if name not in buffers}, group)

    def _flat(self, names: Iterable[str]) -> FlatBuffers:
        ports = {entry.name: entry for entry in self.manifest.moving()}
        return FlatBuffers({name: (ports[name].static_shape(), ports[name].dtype) for name in names})
