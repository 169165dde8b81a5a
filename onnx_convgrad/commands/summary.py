"""What `augment` and `lower` print of the model before and after, and the list of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.commands.tables import Output, Table, bytes_text, shape_text
from onnx_convgrad.files import stored_bytes
from onnx_convgrad.graph.namespace import named_values
from onnx_convgrad.parameters import parameters

__all__ = ["Figures", "Rewritten", "gradient_rows", "gradient_table", "parameter_count"]

_TOP = 8
_FOLD = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """What one model file holds."""

    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    nodes: int
    operators: dict[str, int]
    parameters: int
    bytes: int

    @classmethod
    def of(cls, model: ir.Model, path: Path, trainable: int) -> Figures:
        """Figures of a model that is stored at `path`; `trainable` as counted by `parameter_count`."""
        counts = Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph.all_nodes())
        graph = model.graph
        weights = set(graph.initializers)
        return cls(
            [described(v) for v in graph.inputs if v.name not in weights],
            [described(v) for v in graph.outputs],
            sum(counts.values()),
            dict(counts.most_common()),
            trainable,
            stored_bytes(model, path),
        )


def parameter_count(primal: ir.Model) -> int:
    """Number of trainable values in a canonical model."""
    return sum(v.const_value.size for v in parameters(primal.graph) if v.const_value is not None)


def described(value: ir.Value) -> dict[str, Any]:
    """Name, dtype and shape of a value, ready for JSON."""
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    return {"name": value.name, "dtype": str(value.dtype.numpy()) if value.dtype else None, "shape": shape}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A model that a command has rewritten to a file, which took so many seconds.

    Attributes:
        data: The file that the weights were written to, if any.
        without: Figures that say nothing of this command.
    """

    model: Path
    output: Path
    data: Path | None
    before: Figures
    after: Figures
    seconds: float
    without: Collection[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        before, after = (
            {name: figure for name, figure in asdict(figures).items() if name not in self.without}
            for figures in (self.before, self.after)
        )
        return {
            "model": str(self.model),
            "output": str(self.output),
            "external_data": str(self.data) if self.data else None,
            "before": before,
            "after": after,
            "seconds": round(self.seconds, 4),
        }

    def show(self, out: Output, *, every: bool) -> None:
        """Print where it went and the figures; without `every`, the rarer operators are summed up."""
        out.line(f"{self.model} -> {self.output}")
        if self.data:
            out.line(f"The weights are in {self.data}.")
        out.line()
        out.table(self._comparison(every=every))

    def _comparison(self, *, every: bool) -> Table:
        before, after = self.before, self.after
        rows = [
            ["inputs", str(len(before.inputs)), str(len(after.inputs))],
            ["outputs", str(len(before.outputs)), str(len(after.outputs))],
            ["nodes", f"{before.nodes:,}", f"{after.nodes:,}"],
        ]
        names = sorted({*before.operators, *after.operators}, key=lambda op: (-after.operators.get(op, 0), op))
        top, rest = (names, []) if every or len(names) <= _TOP + 2 else (names[:_TOP], names[_TOP:])
        rows.extend([f"  {op}", _count(before.operators, [op]), _count(after.operators, [op])] for op in top)
        if rest:
            other = f"  {len(rest)} other operators"
            rows.append([other, _count(before.operators, rest), _count(after.operators, rest)])
        rows += [
            ["parameters", f"{before.parameters:,}", f"{after.parameters:,}"],
            ["size", bytes_text(before.bytes), bytes_text(after.bytes)],
            ["seconds", "", f"{self.seconds:.2f}"],
        ]
        return Table(["", "before", "after"], [row for row in rows if row[0] not in self.without], frozenset({1, 2}))


def _count(operators: Mapping[str, int], names: list[str]) -> str:
    return f"{sum(operators.get(name, 0) for name in names):,}"


def gradient_rows(model: ir.Model, gradients: Mapping[str, str]) -> list[dict[str, Any]]:
    """Per gradient: the value, the output that holds it, its dtype and shape."""
    values = named_values(model.graph)
    return [{"value": name, "output": output, **_typed(values[output])} for name, output in gradients.items()]


def _typed(value: ir.Value) -> dict[str, Any]:
    return {k: v for k, v in described(value).items() if k != "name"}


def gradient_table(rows: list[dict[str, Any]], *, every: bool = False) -> tuple[Table, str]:
    """The gradients, folded when there are many, and the line that says how many more there are."""
    shown = rows if every or len(rows) <= _FOLD + 2 else rows[:_FOLD]
    cells = [[row["value"], row["output"], shape_text(row["shape"]), row["dtype"] or "?"] for row in shown]
    more = f"... and {len(rows) - len(shown)} more (-v shows all)" if len(shown) < len(rows) else ""
    return Table(["gradient of", "output", "shape", "dtype"], cells), more
