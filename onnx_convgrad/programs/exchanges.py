"""Exchanges between ranks inside a training step, for BatchNormalization with the statistics of all samples.

The graph `synchronized` of a program computes the gradients of one rank's samples, in terms of numbers of all ranks. An
exchange is an output with this rank's numbers and an input with those of all ranks, made from the former; so the graph
consists of standard operators, and runs in stages (`training.staged`). There are two kinds:

    moments  mean, var and count of each channel of a value: of this rank's entries -> of those of all ranks
    sum      a vector of cotangents -> its sum over all ranks

The loss is the sum over the ranks of each one's own, times the rank's `share`, which is a further input: cotangents of
statistics reach other ranks' samples with this weight. A rank whose share is 0 contributes to statistics alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter, known
from onnx_convgrad.ir.normalized import Channels
from onnx_convgrad.ir.notes import EXCHANGES, origin_of
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.manifest import Port

KINDS = {"MomentsOverRanks": "moments", "SumOverRanks": "sum"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of numbers between ranks, inside a step.

    Attributes:
        kind: `"moments"` or `"sum"`.
        own: Output with this rank's numbers, a vector; of moments: means, variances, and the number of entries.
        total: Input with those of all ranks, of the same shape.
        size: Length of both.
    """

    kind: str
    own: str
    total: str
    size: int


@dataclass(frozen=True, slots=True)
class Exchanges:
    """All exchanges of a graph, and the input with the rank's share in the loss."""

    share: str
    members: tuple[Exchange, ...]

    def write(self, model: ir.Model) -> None:
        """Note the exchanges in the metadata of a graph."""
        model.metadata_props[EXCHANGES] = json.dumps(asdict(self))

    @classmethod
    def read(cls, model: ir.Model) -> Exchanges:
        """The exchanges that the metadata of a graph note."""
        values = json.loads(model.metadata_props[EXCHANGES])
        return cls(values["share"], tuple(Exchange(**member) for member in values["members"]))


def add_exchanges(draft: Draft, share: ir.Value | None) -> Exchanges:
    """Replace the abstract operators of a differentiated draft by outputs and inputs, in place."""
    assert share is not None, "the loss was multiplied by it"
    draft.restart()  # nodes are emitted before others that computed the same
    graph, e = draft.graph, draft.e
    nodes = [node for node in graph if node.domain == DOMAIN and node.op_type in KINDS]
    before, members = set(draft.forward), []
    for number, node in enumerate(nodes):
        kind = KINDS[node.op_type]
        e.anchor, start = node, len(e.emitted)
        with draft.named(f"exchange_{number}"):
            own = _packed(e, node) if kind == "moments" else Call(node)["X"]
            names, size = [e.names.claim(f"{name}_{number}") for name in ("own", "total")], _length(own, node)
            total = draft.input(Port(names[1], (own.dtype or ir.DataType.FLOAT).numpy().name, (size,)))
            pieces = _unpacked(e, total, size // 2) if kind == "moments" else [total]
            for result, piece in zip(node.outputs, pieces, strict=True):
                result.replace_all_uses_with(piece)
            draft.output(own, names[0])
        if node in before:
            draft.forward += e.emitted[start:]
        members.append(Exchange(kind, names[0], names[1], size))
    graph.remove(nodes, safe=True)
    draft.restart()
    return Exchanges(share.name or "", tuple(members))


def _packed(e: Emitter, node: ir.Node) -> ir.Value:
    """Means, variances and number of this rank's entries, as one vector."""
    x = e.wide(Call(node)["X"])
    channels = Channels(e, x)
    mean = e.op("ReduceMean", x, channels.axes, keepdims=1)
    centered = e.sub(x, mean)
    var = e.op("ReduceMean", e.square(centered), channels.axes, keepdims=1)
    flat = [e.typed(channels.flat(value), result) for value, result in zip((mean, var), node.outputs, strict=False)]
    count = e.div(e.cast_like(e.op("Size", x), x), float(_length(flat[0], node)))
    return e.concat([*flat, e.reshape(count, [1])], 0)


def _unpacked(e: Emitter, packed: ir.Value, size: int) -> list[ir.Value]:
    mean, var, count = (e.slice(packed, [i * size], [min((i + 1) * size, 2 * size + 1)], [0]) for i in range(3))
    return [mean, var, e.reshape(count, [])]


def _length(vector: ir.Value, node: ir.Node) -> int:
    size = None if vector.shape is None else known(vector.shape[0])
    if size is None:
        raise ArgumentError(
            f"sync_batchnorm needs the number of channels of node {origin_of(node) or node.name!r}, which is unknown.",
            hint="Store the statistics of the BatchNormalization in the model.",
        )
    return size
