"""Rewrite a model file: read, change and write it, and compare the files before and after."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import onnx_ir as ir

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.tables import Output, Table, bytes_text
from onnx_convgrad.frontend import files
from onnx_convgrad.frontend.files import read

_TOP = 8
"""Most operators that are listed one by one without `--verbose`."""


class _HasModel(Protocol):
    """The result of a change: a model, and more."""

    @property
    def model(self) -> ir.Model: ...


Changed = TypeVar("Changed", bound=_HasModel)


def rewrite(
    model: Path, output: Path | None, out: Output, change: Callable[[], Changed], kind: str = "grad"
) -> tuple[Changed, Rewritten]:
    """Write the result of `change` to `output`, by default `<stem>.<kind>.onnx`, and compare it with `model`."""
    destination = output or files.default_output(model, kind)
    files.check_destination(destination, files.model_file(model))
    with out.stages():
        start = time.perf_counter()
        result = change()
        seconds = time.perf_counter() - start
        announce("writing")
        data = files.write(result.model, destination)
    before, after = _Figures.of(read(model), model), _Figures.of(result.model, destination, data)
    return result, Rewritten(model, destination, data, before, after, seconds)


@dataclass(frozen=True, slots=True)
class _Figures:
    """Counts of one model file."""

    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    nodes: int
    operators: dict[str, int]
    bytes: int

    @classmethod
    def of(cls, model: ir.Model, path: Path, data: Path | None = None) -> _Figures:
        """Count what a model holds that is stored at `path`, with its weights in a file `data` if there is one."""
        counts = Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph.all_nodes())
        graph = model.graph
        weights = set(graph.initializers)
        return cls(
            [described(v) for v in graph.inputs if v.name not in weights],
            [described(v) for v in graph.outputs],
            sum(counts.values()),
            dict(counts.most_common()),
            path.stat().st_size + data.stat().st_size if data else files.stored_bytes(model, path),
        )


def described(value: ir.Value) -> dict[str, Any]:
    """Return name, dtype and shape of a value, ready for JSON."""
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    return {"name": value.name, "dtype": str(value.dtype.numpy()) if value.dtype else None, "shape": shape}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A model that a command has rewritten.

    Attributes:
        data: The file that the weights were written to, if any.
        seconds: Time that the change took.
        parameters: Number of trainable values, if it was counted.
    """

    model: Path
    output: Path
    data: Path | None
    before: _Figures
    after: _Figures
    seconds: float
    parameters: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        counted = {} if self.parameters is None else {"parameters": self.parameters}
        return {
            "model": str(self.model),
            "output": str(self.output),
            "external_data": str(self.data) if self.data else None,
            "before": asdict(self.before) | counted,
            "after": asdict(self.after) | counted,
            "seconds": round(self.seconds, 4),
        }

    def show(self, out: Output) -> None:
        """Print the paths and the counts; unless verbose, the rarer operators are summed up."""
        out.line(f"{self.model} -> {self.output}")
        if self.data:
            out.line(f"The weights are in {self.data}.")
        out.line()
        out.table(self._comparison(every=out.verbose))

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
        if self.parameters is not None:
            rows.append(["parameters", *[f"{self.parameters:,}"] * 2])
        rows += [["size", bytes_text(before.bytes), bytes_text(after.bytes)], ["seconds", "", f"{self.seconds:.2f}"]]
        return Table(["", "before", "after"], rows, {1, 2})


def _count(operators: Mapping[str, int], names: list[str]) -> str:
    return f"{sum(operators.get(name, 0) for name in names):,}"
