"""Run the graphs of a training program on values that stay on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onnx_convgrad.data.inputs import as_array
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.bound_inputs import BindInputs
from onnx_convgrad.memory.in_place import written_over
from onnx_convgrad.metrics.batch_weights import Counts, concatenate
from onnx_convgrad.programs.graph_names import GraphName
from onnx_convgrad.programs.inference import store_apart
from onnx_convgrad.programs.manifest import Port
from onnx_convgrad.programs.masks import initial_state
from onnx_convgrad.programs.precision import masters_of
from onnx_convgrad.programs.privacy import NOISE, first_noise
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike, import_runtime
from onnx_convgrad.runtime.providers import CPU, CUDA, check_available, resolve_providers
from onnx_convgrad.training.buffers import BoundGraph, Buffers, Device, Roles, empty, ort_values
from onnx_convgrad.training.sessions import Accumulation, checked_session, defaults, fed_session

Arrays = Mapping[str, np.ndarray]

Results = dict[str, Any]
"""Output of a graph -> array, or numpy scalar. `Any`, so that callers may do arithmetic with either."""

GraphUse = Literal["step", "accumulate", "update", "evaluate", "inference"]


_FLAT = "Give what flat_parameters of the same program returned."


class Engine:
    """Runs the graphs of a program; sessions, whose `options` are those of `runtime.session`, are created on first use.

    Values stay on the device of the first of the `providers`. Unless it is 0, the initial random state depends on `seed`
    and on the program's own seed.
    """

    def __init__(
        self,
        program: TrainingProgram,
        seed: int,
        providers: Providers | None = None,
        options: SessionOptionsLike | None = None,
    ) -> None:
        self.program, self.seed, self.providers, self.options = program, seed, providers, options
        m = self.manifest = program.manifest
        self.losses = (m.loss, *m.terms, *m.parts())
        self.counts = Counts(program)
        self._next = {entry.next: entry.name for entry in m.moving()}
        self._fed = {entry.name for entry in m.moving()} | {m.learning_rate.name}
        self._device = _device(providers)
        self._graphs: dict[GraphUse, BoundGraph] = {}
        self._replaced: set[str] = set()
        self._last_rate: tuple[float, dict[str, Any]] | None = None

    # -- runs ----------------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Arrays], rate: float, outputs: Sequence[str]) -> Results:
        """Update from the union of batches; return the named outputs.

        A batch of weight 0 has no effect but that of its forward pass; an empty one has no samples. Private training may
        have no samples at all: its noise is added to zero, and the loss is 0.
        """
        batches = [batch for batch in batches if batch]
        if len(batches) == 1:
            return self._graph("step")({**self._fed_values(batches[0]), **self._rate(rate)}, outputs)
        results = self._union(batches, outputs)
        return results | self._update(rate)  # last: parameters stay as they are if the above raises

    def gradients(self, batches: Sequence[Arrays]) -> dict[str, np.ndarray]:
        """The gradients of the loss of the union of batches, by parameter; statistics and random state are put back."""
        before = self.read(s.name for s in self.manifest.state if s.kind != "optimizer")
        self._union(batches, ())
        found = self.read(p.gradient for p in self.manifest.parameters)
        self.write(before)
        return {p.name: found[p.gradient] for p in self.manifest.parameters}

    def _union(self, batches: Sequence[Arrays], outputs: Sequence[str]) -> Results:
        """Compute the gradients of the loss of the union of batches, for `update`; return the named outputs."""
        outputs = self._without_norms(outputs)
        if not batches:
            self._clear_gradients()
            return {name: np.float32(0) for name in outputs if name in self.losses}
        shares = self.counts.shares(batches)
        return self._combined(self._accumulated(batches, shares, outputs), shares, outputs)

    def _without_norms(self, outputs: Sequence[str]) -> list[str]:
        """The outputs that a forward pass has: norms of gradients come with the update."""
        norms = set(self.manifest.grad_norms().values())
        return [name for name in outputs if name not in norms]

    def _update(self, rate: float) -> Results:
        """Update from the gradients; return the norms that the program computes."""
        return self._graph("update")(self._rate(rate), tuple(self.manifest.grad_norms().values()))

    def _accumulated(self, batches: Sequence[Arrays], shares: np.ndarray, outputs: Sequence[str]) -> list[Results]:
        """Add up the gradients of several batches in the loss of their union; return the named outputs of each."""
        graph, sums = self._graph("accumulate"), self._accumulation
        parts: list[Results] = []
        first = True
        for batch, factor, own in zip(batches, self._factors(shares), shares, strict=True):
            feeds: dict[str, Any] = {sums.weight: np.float64(factor), sums.first: np.bool_(first)}
            if sums.share is not None:
                feeds[sums.share] = own.astype(np.float32)
            parts.append(graph(self._fed_values({**batch, **feeds}), outputs, keep=() if factor else ("gradient",)))
            first = first and not factor
        return parts

    def _factors(self, shares: np.ndarray) -> list[float]:
        """The factor of the gradients of each batch; those of private training, and those in shares, are added up."""
        if "privacy" in self.manifest.options or self._accumulation.share is not None:
            return [float(row.any()) for row in shares]
        return shares[:, 0].tolist()  # type: ignore[no-any-return]

    def _clear_gradients(self) -> None:
        """Set all gradients to zero."""
        self.prepare("accumulate")
        self._buffers.write({p.gradient: np.zeros(p.static_shape(), p.slope.dtype) for p in self.manifest.parameters})

    def prepare(self, *runs: GraphUse) -> None:
        """Create some sessions now instead of in their first run."""
        for run in runs:
            self._graph(run)

    def evaluate(self, batch: Arrays, outputs: Sequence[str]) -> Results:
        """Run in inference mode; return the named outputs."""
        return self._graph("evaluate")(self._fed_values(batch), outputs)

    def _fed_values(self, batch: Arrays) -> dict[str, Any]:
        """OrtValues of a batch, and of the weights of the terms."""
        return ort_values({**batch, **self.counts.fed_weights()})

    def predict(self, batch: Arrays, outputs: Sequence[str]) -> Results:
        """Run the model alone; return the named outputs."""
        return self._graph("inference")(ort_values(batch), outputs)

    def _combined(self, parts: Sequence[Results], shares: np.ndarray, outputs: Sequence[str]) -> Results:
        """The losses of a union of batches, and the concatenation of every other output."""
        shared = self._accumulation.share is not None
        results: Results = {}
        for name in outputs if parts else ():
            found = [part[name] for part in parts]
            if name not in self.losses or np.ndim(found[0]):
                results[name] = concatenate(name, found, self.manifest.batch_axes.get(name, 0))
                continue
            own = self._summands_of(name)
            total = sum(
                float(part[s["value"]]) * weight * (1.0 if shared else share[i])
                for part, share in zip(parts, shares, strict=True)
                for i, s, weight in own
                if share[i]
            )
            results[name] = type(found[0])(total)
        return results

    def _summands_of(self, name: str) -> list[tuple[int, Mapping[str, Any], float]]:
        """Number, entry and weight of the summands of an output with a loss."""
        numbered = list(enumerate(self.counts.summands))
        if name == self.manifest.loss:
            return [(i, s, self.counts.weight(s)) for i, s in numbered]
        within = {s["value"] for output, term in zip(self.manifest.terms, self.manifest.losses, strict=False)
                  for s in term["summands"] if output == name} or {name}  # fmt: skip
        return [(i, s, 1.0) for i, s in numbered if s["value"] in within]

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copy values from the device."""
        return self._buffers.read(names)

    def shown(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Values that this engine holds: in main memory the arrays themselves, from another device copies."""
        self._buffers.check()
        return {name: self._buffers.current(name).numpy() for name in names}

    def own(self) -> dict[str, np.ndarray]:
        """Copies of the values that this engine holds; no other rank takes part."""
        return self._buffers.read(self.held())

    def before(self) -> dict[str, np.ndarray] | None:
        """The values before the last step; `None` if a step writes over them, or there was none."""
        if self._buffers.shared:
            return None
        return {name: np.array(self._buffers.spare(name).numpy()) for name in self.held()}

    def held(self) -> list[str]:
        """The names of the values that this engine holds: all that a step changes."""
        return [entry.name for entry in self.manifest.moving()]

    def to_save(self) -> dict[str, np.ndarray]:
        """The values of a checkpoint."""
        return self.read([*(entry.name for entry in self.manifest.moving()), *sorted(self._replaced)])

    def exported(self) -> dict[str, np.ndarray]:
        """The values that an exported model stores, without averages."""
        return self.read([*(entry.name for entry in self.manifest.stored()), *sorted(self._replaced)])

    def initial(self, name: str) -> np.ndarray:
        """The value with which the program starts."""
        return defaults(self.program.model("step"), [name])[name]

    def write(self, values: Arrays) -> None:
        """Replace values by others of the same shape and dtype; masters that are not given follow their parameters."""
        self._buffers.write({**masters_of(self.manifest, values), **values})

    def replace(self, values: Arrays) -> None:
        """Replace frozen weights. The first time, they become inputs of the graphs, whose sessions are created anew."""
        new = {name: array for name, array in values.items() if name not in self._replaced}
        if new:
            held = {name: empty(array, self._device) for name, array in new.items()}
            self._buffers.add_made((held, held), "frozen")
            self._replaced |= new.keys()
            self._fed |= new.keys()
            self._graphs.clear()
        self._buffers.write(values)

    def restore(self, values: Arrays, seed: int) -> None:
        """Continue with the values and the seed of a checkpoint."""
        self.seed = seed
        original = {name: self.initial(name) for name in self._replaced - values.keys()}
        self.replace(original | {name: array for name, array in values.items() if name in self.manifest.frozen})
        self.write(values)

    def check_ranks(self) -> None:
        """Raise an error if other ranks have other parameters; there are none."""

    def read_flat(self, entries: Sequence[Port]) -> np.ndarray:
        """Concatenate values to a vector, in the widest of their dtypes."""
        values = self.read(entry.name for entry in entries)
        return np.concatenate([values[entry.name].reshape(-1) for entry in entries])

    def write_flat(self, entries: Sequence[Port], vector: np.ndarray) -> None:
        """Replace values by the pieces of a vector.

        Raises:
            ArgumentError: The vector has another length.
        """
        sizes, vector = [math.prod(entry.static_shape()) for entry in entries], as_array(vector)
        if vector.dtype.kind not in "biuf":
            raise ArgumentError(f"The vector holds {vector.dtype}, not numbers.", hint=_FLAT)
        if vector.shape != (sum(sizes),):
            raise ArgumentError(
                f"The vector has shape {vector.shape}; the {len(sizes)} values need ({sum(sizes)},).", hint=_FLAT
            )
        pieces = zip(entries, np.split(vector, np.cumsum(sizes)[:-1]), strict=True)
        self.write({entry.name: piece.reshape(entry.static_shape()).astype(entry.dtype) for entry, piece in pieces})

    # -- graphs and buffers --------------------------------------------------------------------------------------------

    def _rate(self, rate: float) -> dict[str, Any]:
        if self._last_rate is None or self._last_rate[0] != rate:
            self._last_rate = rate, ort_values({self.manifest.learning_rate.name: np.float32(rate)})
        return self._last_rate[1]

    @cached_property
    def _accumulation(self) -> Accumulation:
        return Accumulation(self.program.model(self._gradients_of_shares()), self.manifest)

    def _gradients_of_shares(self) -> GraphName:
        """The graph with the gradients of a batch in the loss of a union: a factor suffices if there is one summand."""
        return "shared" if "shared" in self.manifest.graphs() else "gradients"

    def _graph(self, run: GraphUse) -> BoundGraph:
        if run not in self._graphs:
            self._graphs[run] = self._bound(run)
        return self._graphs[run]

    def _model(self, run: GraphUse) -> ir.Model:
        model = self._accumulation.model if run == "accumulate" else self.program.model(run)
        if not self._replaced:
            return model
        model = model.clone()
        if run == "inference":
            store_apart(model.graph, self.manifest.frozen)
        stored, inputs = model.graph.initializers, {value.name for value in model.graph.inputs}
        model.graph.inputs.extend(stored[n] for n in sorted(self._replaced) if n in stored and n not in inputs)
        return model

    def _bound(self, run: GraphUse) -> BoundGraph:
        model = self._model(run)
        roles = self._roles(run)
        if run == "inference":
            inputs = {value.name for value in model.graph.inputs}
            given = self.manifest.options.get("input_values") or {}
            model = model.clone()
            BindInputs({name: value for name, value in given.items() if name in inputs})(model)
            stored = (model.graph.initializers[entry.name] for entry in self.manifest.stored())
            model.graph.inputs.extend(value for value in stored if value.name not in inputs)
        options = {"providers": self.providers, "options": self.options}
        late = self._buffers.shared & set(roles.writes.values()) if run in ("step", "update") else set()
        if late:
            session, safe = checked_session(model, self._fed, **options)
            self._buffers.separate(late - safe)
        else:
            session = fed_session(model, self._fed, **options)
        return BoundGraph(session, roles)

    def _shared(self) -> set[str]:
        """The values that a step of a program with a memory budget updates in place.

        Only the CPU provider is sure to run the nodes one after the other: others compile several into one.
        """
        if resolve_providers(self.providers)[0][0] != CPU:
            return set()
        step = {v.name or "" for v in written_over(self.program.model("step").graph).values()}
        return step and step & {v.name or "" for v in written_over(self.program.model("update").graph).values()}

    def _roles(self, run: GraphUse) -> Roles:
        """The buffers that a graph reads and writes, and those that only others do."""
        reads, writes = {name: name for name in self._fed if name in self._buffers}, dict(self._next)
        if run not in ("step", "accumulate", "update"):  # inference
            reads |= self.manifest.averages()
        if run in ("accumulate", "update"):
            gradients = [p.gradient for p in self.manifest.parameters]
            if gradients[0] not in self._buffers:
                self._add_gradients(self._buffers)
            reads |= {name: name for name in gradients} | self._accumulation.reads
            writes |= self._accumulation.writes
        return Roles(self._buffers, reads, writes)

    def _add_gradients(self, buffers: Buffers) -> None:
        """Add buffers for the gradients."""
        zeros = {p.gradient: np.zeros(p.static_shape(), p.slope.dtype) for p in self.manifest.parameters}
        buffers.add(zeros, "gradient")

    def _random_seeds(self) -> tuple[int, ...]:
        """The seeds that the random state depends on, besides the program's; nothing if it is that of the program."""
        return (self.seed,) if self.seed else ()

    def _first_random(self, stored: np.ndarray, seeds: tuple[int, ...]) -> np.ndarray:
        """The first random state: the `stored` one, unless it depends on seeds."""
        return np.asarray(initial_state((self.manifest.options["seed"], *seeds)), stored.dtype) if seeds else stored

    @cached_property
    def _buffers(self) -> Buffers:
        """The initial values, in two groups: those that `update` changes and those that the forward pass changes."""
        start = defaults(self.program.model("step"), self._next.values())
        kinds, slots = ({s.name: getattr(s, key) for s in self.manifest.state} for key in ("kind", "slot"))
        for name in start:
            if kinds.get(name) == "random":
                start[name] = self._first_random(start[name], self._random_seeds())
            elif slots.get(name) == NOISE and self.seed:  # the same on all ranks
                start[name] = np.asarray(first_noise((self.manifest.options["seed"], self.seed)), start[name].dtype)
        buffers = Buffers(self._device)
        self._add_values(
            buffers, {k: v for k, v in start.items() if kinds.get(k, "optimizer") == "optimizer"}, "update"
        )
        self._add_values(
            buffers, {k: v for k, v in start.items() if kinds.get(k) not in (None, "optimizer")}, "forward"
        )
        return buffers

    def _add_values(self, buffers: Buffers, start: Arrays, group: str) -> None:
        """Add buffers for values that the program updates, with their first values."""
        buffers.add(start, group, self._shared())


def _device(providers: Providers | None) -> Device:
    """The device of the first provider; raises `ExecutionError` if a provider is missing."""
    resolved = resolve_providers(providers)
    check_available(import_runtime(), [name for name, _ in resolved])
    name, options = resolved[0]
    return ("cuda", int(options.get("device_id", "0"))) if name == CUDA else ("cpu", 0)
