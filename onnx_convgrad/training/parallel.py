"""Run a training program on several ranks: each computes the gradients of its samples, and all add them up."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import limited
from onnx_convgrad.distributed.launchers import local_rank, local_size
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.programs.graph_names import GraphName
from onnx_convgrad.programs.manifest import State
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.buffers import Buffers
from onnx_convgrad.training.engine import Arrays, Engine, GraphUse, Results
from onnx_convgrad.training.flat_buffers import FlatBuffers, Zeros, shapes_of
from onnx_convgrad.training.overlap import Background, OverlappedGraph, in_buckets
from onnx_convgrad.training.sessions import fed_session
from onnx_convgrad.training.staged import StagedGraph


class ParallelEngine(Engine):
    """An engine of one rank. Every rank calls `step`, `restore` at the same time.

    Parameters and optimizer state are the same on all ranks. Gradients and losses are those of the union of all batches.
    Running statistics are averaged over the ranks that have samples. Random states differ between ranks, by amounts that
    stay the same.

    Arguments are those of `Engine`, and the ranks. Unless `options` say otherwise, the ranks of a machine share its cores.

    Raises:
        ArgumentError: The loss is not one number.
    """

    def __init__(
        self,
        program: TrainingProgram,
        seed: int,
        providers: Providers | None,
        options: SessionOptionsLike | None,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        super().__init__(program, seed, _own_device(providers, ranks), _share_cores(options, ranks))
        self._flats: tuple[FlatBuffers, FlatBuffers] | None = None
        self._synchronized = bool(self.manifest.options.get("sync_batchnorm"))
        if any(term["options"].get("reduction") == "none" for term in self.manifest.losses):
            raise ArgumentError(
                "Several ranks cannot train with a loss of the reduction 'none', which is not one number.",
                hint="Use the reduction 'mean' or 'sum'.",
            )

    def _shared(self) -> set[str]:
        """No values are shared: ranks add up gradients before they update."""
        return set()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Arrays], rate: float, outputs: Sequence[str]) -> Results:
        """Update from the batches of all ranks, each of which gives its own; an empty one has no samples.

        Returns the loss of all, and the other named outputs of this rank's own samples, if it has any.
        """
        return self._union(batches, outputs) | self._update(rate)

    def _union(self, batches: Sequence[Arrays], outputs: Sequence[str]) -> Results:
        """Compute the gradients of the loss of the batches of all ranks; see `Engine._union`."""
        outputs = self._without_norms(outputs)
        present = [batch for batch in batches if batch]
        shares = self.counts.shares(present, self.ranks.sums)
        factors = self._factors(shares)
        if self._synchronized:
            parts = self._accumulated_together(batches, shares, outputs)
        else:
            self._announce(factors)
            parts = self._accumulated(present, shares, outputs)
        results = self._combined(parts, shares, outputs)
        self._sum_gradients(empty=not (present if self._synchronized else any(factors)))
        results |= self._losses_of_all([name for name in outputs if name in self.losses], results)
        if not self._synchronized:
            self._average_statistics(len(present))
        self._skip_masks(len(batches) - len(present))
        return results

    def _accumulated_together(
        self, batches: Sequence[Arrays], shares: np.ndarray, outputs: Sequence[str]
    ) -> list[Results]:
        """Accumulate with the statistics of all ranks in BatchNormalization; empty batches are among `batches`."""
        graph, sums, rest = self._staged, self._accumulation, iter(shares.astype(np.float32))
        parts: list[Results] = []
        for batch in batches:
            if batch:
                feeds = {sums.weight: np.float64(1), sums.first: np.bool_(not parts), graph.share: next(rest)}
                parts.append(graph(self._fed_values({**batch, **feeds}), outputs))
            else:
                graph.idle()
            self._average_statistics(int(bool(batch)))
        return parts

    @cached_property
    def _staged(self) -> StagedGraph:
        model = self._model("accumulate")
        return StagedGraph(model, self._roles("accumulate"), self.ranks, self._session_of_stage)

    def _session_of_stage(self, stage: ir.Model) -> Any:
        return fed_session(stage, self._fed, providers=self.providers, options=self.options)

    def _gradients_of_shares(self) -> GraphName:
        return "synchronized" if self._synchronized else super()._gradients_of_shares()

    def _losses_of_all(self, names: Sequence[str], results: Mapping[str, Any]) -> Results:
        found = {v.name: v.dtype for v in self._accumulation.model.graph.outputs}
        kinds = {name: (found[name] or ir.DataType.FLOAT).numpy() for name in names}
        sums = self.ranks.sums([float(results.get(name, 0.0)) for name in names])
        return {name: kinds[name].type(value) for name, value in zip(names, sums, strict=True)}

    @cached_property
    def _overlapped(self) -> bool:
        """Whether sums of gradients begin during the backward pass."""
        flat = self._in_main_memory() or self._zeros() is not None
        return self.ranks.overlap and flat and not self._synchronized

    @cached_property
    def _buckets(self) -> list[list[str]]:
        """The outputs with gradients that are added up together."""
        sums = self._accumulation
        return in_buckets(sums.model.graph, list(sums.writes)) if self._overlapped else [list(sums.writes)]

    @cached_property
    def _background(self) -> Background:
        return Background()

    def _announce(self, factors: Sequence[float]) -> None:
        """Let the last batch that counts tell which gradients are ready."""
        if self._overlapped and any(factors):
            graph: Any = self._graph("accumulate")
            last = max(number for number, factor in enumerate(factors) if factor)
            graph.announce(lambda bucket: self._add_up(bucket, 1 - self._buffers.turn("gradient")), last)

    def _add_up(self, bucket: int, turn: int) -> None:
        """Add up a bucket of gradients over all ranks, in the background."""
        assert self._flats is not None
        names = [self._accumulation.writes[name] for name in self._buckets[bucket]]
        pieces = self._flats[turn].pieces(names)
        for piece in pieces:
            self._background.add(partial(self.ranks.all_reduce, piece))

    def _sum_gradients(self, *, empty: bool) -> None:
        """Add up the gradients of all ranks where ONNX Runtime has written them; those of an `empty` rank are 0."""
        buffers = self._buffers
        if self._flats is not None:
            turn = buffers.turn("gradient")
            if empty:
                self._flats[turn].clear()
            if not self._overlapped:
                for array in self._flats[turn].arrays:
                    self.ranks.all_reduce(array)
                return
            for bucket in range(len(self._buckets)) if empty else ():
                self._add_up(bucket, turn)
            self._background.wait()
            return
        host = FlatBuffers(shapes_of(self.manifest.parameters))  # the gradients are on another device
        if not empty:
            for name, value in host.values.items():
                value.numpy()[...] = buffers.current(name).numpy()
        for array in host.arrays:
            self.ranks.all_reduce(array)
        buffers.write({name: value.numpy() for name, value in host.values.items()})

    def _average_statistics(self, batches: int) -> None:
        """Average the running statistics over the ranks that have had samples."""
        names = [s.name for kind in ("statistic", "wide statistic") for s in self._states(kind)]
        if not names:
            return
        values = self.read(names)
        flat = np.concatenate([*(values[name].reshape(-1).astype(np.float64) for name in names), [1.0]])
        if not batches:
            flat[:] = 0
        self.ranks.all_reduce(flat)
        pieces = np.split(flat[:-1] / flat[-1], np.cumsum([values[name].size for name in names])[:-1])
        averages = {name: piece.reshape(values[name].shape) for name, piece in zip(names, pieces, strict=True)}
        averages |= {s.of or "": limited(averages[s.name], str(values[s.of or ""].dtype))
                     for s in self._states("wide statistic")}  # fmt: skip
        self.write({name: average.astype(values[name].dtype) for name, average in averages.items()})

    def _skip_masks(self, batches: int) -> None:
        """Count batches without samples as if their masks had been drawn."""
        if batches:
            random = self.read(s.name for s in self._states("random"))
            self.write({name: _shifted(state, batches) for name, state in random.items()})

    # -- values --------------------------------------------------------------------------------------------------------

    def restore(self, values: Arrays, seed: int) -> None:
        """Continue with the values of rank 0, which has a checkpoint; random states keep their distances from its own."""
        self.seed = seed
        ahead = self._ahead()
        for entry in self.manifest.moving():
            taken = np.zeros(entry.static_shape(), entry.dtype)
            taken[...] = values.get(entry.name, taken)
            self.ranks.broadcast(taken)
            self.write({entry.name: _shifted(taken, ahead.get(entry.name, 0))})
        for name in self.ranks.of_leader([name for name in self.manifest.frozen if name in values]):
            port = self.program.frozen()[name]
            taken = np.array(values.get(name, np.zeros(port.static_shape(), port.dtype)), order="C")
            self.ranks.broadcast(taken)
            self.replace({name: taken})

    def replace(self, values: Arrays) -> None:
        """Replace frozen weights; see `Engine.replace`."""
        super().replace(values)
        self.__dict__.pop("_staged", None)

    def check_ranks(self) -> None:
        """Raise `ExecutionError` if the parameters or the step of a rank have other bits than those of rank 0."""
        parts = {s.name for s in self.manifest.state if s.kind != "optimizer" or s.of is not None}
        names, total = [name for name in self.held() if name not in parts], 0
        for array in self.read(names).values():
            total = zlib.crc32(array.tobytes(), total)
        sums = [int(content) for content in self.ranks.gather(str(total).encode())]
        for rank, own in enumerate(sums):
            if own != sums[0]:
                raise ExecutionError(
                    f"Rank {rank} of {len(sums)} has other parameters than rank 0: its updates had other bits.",
                    hint="Use machines and versions of one kind, and go on from the last checkpoint.",
                )

    def _ahead(self) -> dict[str, int]:
        """The distance of each random state of this rank from that of rank 0."""
        stored = {s.name: self.initial(s.name) for s in self._states("random")}
        seeds = self._random_seeds(), super()._random_seeds()
        return {
            name: int(self._first_random(state, seeds[0])) - int(self._first_random(state, seeds[1]))
            for name, state in stored.items()
        }

    def _in_main_memory(self) -> bool:
        """Whether communicators can work on the values where they are."""
        return self._device[0] == "cpu"

    def _states(self, kind: str) -> list[State]:
        return [s for s in self.manifest.state if s.kind == kind]

    def _random_seeds(self) -> tuple[int, ...]:
        return (self.seed, self.ranks.rank) if self.ranks.rank else super()._random_seeds()

    def _bound(self, run: GraphUse) -> Any:
        if run != "accumulate" or not self._overlapped:
            return super()._bound(run)
        return OverlappedGraph(self._model(run), self._buckets, self._roles(run), self._session_of_stage)

    def _add_gradients(self, buffers: Buffers) -> None:
        zeros = self._zeros()
        if zeros is None and not self._in_main_memory():
            super()._add_gradients(buffers)
            return
        shapes = shapes_of(self.manifest.parameters)
        in_order = [self._accumulation.writes[name] for bucket in self._buckets for name in bucket]
        shapes = {name: shapes[name] for name in in_order}
        self._flats = FlatBuffers(shapes, zeros), FlatBuffers(shapes, zeros)
        buffers.add_made((self._flats[0].values, self._flats[1].values), "gradient")

    def _zeros(self) -> Zeros | None:
        """The maker of arrays on the device that the communicator adds up there; `None` if it cannot."""
        device = getattr(self.ranks.communicator, "on_device", None)
        return None if device is None or self._in_main_memory() else device(*self._device)


def _shifted(state: np.ndarray, by: int) -> np.ndarray:
    """A random state some steps later, modulo 2^32 as in the graph."""
    if not by:
        return state
    return np.asarray((state.astype(np.int64) + by).astype(np.uint32).astype(state.dtype))


def _share_cores(options: SessionOptionsLike | None, ranks: Ranks) -> SessionOptionsLike:
    """Session options with this rank's share of the cores, unless they are given as a whole."""
    if options is not None and not isinstance(options, Mapping):
        return options
    given = dict(options or {})
    shared = {"threads": max(cores() // local_size(ranks.size), 1), "spinning": False}
    return {**shared, **{key: value for key, value in given.items() if value is not None}}


def _own_device(providers: Providers | None, ranks: Ranks) -> Providers | None:
    """The providers of a rank: if only `"cuda"` is said, the GPU of its number among the ranks of its machine."""
    own = f"cuda:{local_rank(ranks.rank)}"
    if isinstance(providers, str):
        return own if providers == "cuda" else providers
    if isinstance(providers, Sequence) and not isinstance(providers, tuple):
        return [own if provider == "cuda" else provider for provider in providers]
    return providers
