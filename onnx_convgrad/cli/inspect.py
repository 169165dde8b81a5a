"""The command `inspect`: show inputs, outputs, layers and parameters of a model, and the globs that select them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.tables import Output, Table, bytes_text, shape_text
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.pipeline.options import Loading

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_convgrad.frontend.inspection import Globs, Stored

_ROWS = 30
"""Most rows of the tree if no depth is given."""


@command(verbose="the whole tree, constants, and the results of all nodes.")
def inspect(
    model: Model,
    *,
    loading: Loading,
    depth: Annotated[
        int | None, own_option("INT", f"Levels of the tree. [default: what fits {_ROWS} rows]", min=1)
    ] = None,
    out: Output,
) -> None:
    """Show inputs, outputs, layers and parameters of a model.

    The last column has the glob that selects a layer in --wrt and --freeze.

    \b
    Example:
      onnx-convgrad inspect model.onnx
      onnx-convgrad inspect model.onnx --depth 2
      onnx-convgrad inspect speech.onnx --input-value sr=16000
    """
    with out.stages("reading"):
        shown = _Inspected.of(model, loading)
    if out.json:
        out.print_json(shown.to_dict())
    else:
        shown.show(out, depth)


@dataclass(frozen=True, slots=True)
class _Inspected:
    """The content of a file; `source` is its graph, `base` the canonical one, which `values` are from."""

    path: Path
    source: ir.Model
    base: ir.Model
    values: Sequence[Stored]
    globs: Globs

    @classmethod
    def of(cls, path: Path, loading: Loading) -> _Inspected:
        from onnx_convgrad.frontend.files import read
        from onnx_convgrad.frontend.inspection import Globs, stored_values, undescribed

        try:
            loaded = loading.load(path)
        except ConvGradError as problem:
            if loading.input_shapes or loading.input_values:
                raise
            source = base = read(path)
            values = undescribed(source, problem)
        else:
            source, base, values = read(loaded), loaded.canonical, stored_values(loaded)
        return cls(path, source, base, values, Globs(values))

    @property
    def trained(self) -> list[Stored]:
        """The parameters that are trained by default."""
        return [v for v in self.values if v.kind == "parameter"]

    @property
    def numbers(self) -> int:
        """The numbers that are trained by default."""
        return sum(v.count for v in self.trained)

    @property
    def files(self) -> dict[str, int | None]:
        """File of external data -> its bytes, `None` if it is missing."""
        from onnx_convgrad.ir.serialize import external_tensors

        files = {str(t.location): Path(t.path) for t in external_tensors(self.source)}
        return {name: file.stat().st_size if file.exists() else None for name, file in files.items()}

    def layers(self, values: Sequence[Stored], depth: int) -> Iterator[dict[str, Any]]:
        """The rows of the tree of some values."""
        from onnx_convgrad.frontend.inspection import NameTree, tree

        numbers = self.numbers
        for level, label, member in tree(values).rows(depth):
            inside = list(member.everything()) if isinstance(member, NameTree) else [member]
            counts = [v.count for v in inside if v.kind == "parameter"]
            yield {
                "level": level,
                "layer": label,
                "tensors": len(counts),
                "parameters": sum(counts),
                "share": sum(counts) / numbers if numbers else 0.0,
                "glob": self.globs.of(inside),
                "member": member,
            }

    def _ports(self) -> dict[str, list[dict[str, Any]]]:
        from onnx_convgrad.cli.rewrite import described

        graph = self.source.graph
        inputs = [described(v) for v in graph.inputs if v.name not in graph.initializers]
        return {"inputs": inputs, "outputs": [described(v) for v in graph.outputs]}

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The whole content as JSON values."""
        from onnx_convgrad.cli.rewrite import described
        from onnx_convgrad.frontend.metadata import labels_of, preprocessing_of, states_of

        labels, preprocessing = labels_of(self.source), preprocessing_of(self.source)
        rows = [
            {**{k: v for k, v in row.items() if k != "member"}, "share": round(row["share"], 6)}
            for row in self.layers([v for v in self.values if v.kind != "constant"], 10**6)
        ]
        nodes = [
            {"name": node.name, "operator": node.op_type, "results": [described(v) for v in node.outputs if v.name]}
            for node in self.base.graph
        ]
        return {
            "model": str(self.path),
            "bytes": self.path.stat().st_size,
            "external_data": self.files,
            "opset": dict(self.source.graph.opset_imports),
            "ir_version": self.source.ir_version,
            "producer": self.source.producer_name,
            "producer_version": self.source.producer_version,
            **self._ports(),
            "labels": labels,
            "preprocessing": asdict(preprocessing) if preprocessing else None,
            "states": states_of(self.source),
            "parameters": self.numbers,
            "layers": rows,
            "globs": {glob: [v.name for v in values] for glob, values in self.globs.across().items()},
            "values": [{**asdict(v), "path": "".join(v.path), "numbers": v.count} for v in self.values],
            "nodes": nodes,
        }

    # -- text ----------------------------------------------------------------------------------------------------------

    def show(self, out: Output, depth: int | None) -> None:
        """Print the file, the inputs and outputs, the tree, and what is trained."""
        self._show_file(out)
        rows = [
            [kind.removesuffix("s"), p["dtype"] or "?", shape_text(p["shape"]), str(p["name"])]
            for kind, ports in self._ports().items()
            for p in ports
        ]
        out.table(Table(["", "dtype", "shape", "name"], rows, whole={3}), fold=20)
        out.line()
        values = [v for v in self.values if out.verbose or v.kind != "constant"]
        depth = 10**6 if out.verbose and depth is None else depth or _fitting(values)
        if values:
            out.table(self._tree(values, depth), fold=2 * _ROWS)
            out.line()
        self._show_training(out)
        if out.verbose:
            out.line()
            out.table(self._results())

    def _show_file(self, out: Output) -> None:
        from onnx_convgrad.frontend.metadata import labels_of, preprocessing_of, states_of

        labels, p = labels_of(self.source), preprocessing_of(self.source)
        opsets = ", ".join(f"{domain or 'ai.onnx'} {n}" for domain, n in self.source.graph.opset_imports.items())
        made = " ".join(filter(None, (self.source.producer_name, self.source.producer_version)))
        out.line(f"{self.path}")
        out.line(f"{bytes_text(self.path.stat().st_size)}, {f'made by {made}, ' if made else ''}opset {opsets}")
        for name, held in self.files.items():
            out.line(f"External data in {name}: {'the file is missing' if held is None else bytes_text(held)}")
        if p is not None:
            size = "any size" if p.size is None else f"{p.size[0]}x{p.size[1]}"
            out.line(f"Images: {size}, {p.layout}, (pixel * {p.scale:.6g} - {_numbers(p.mean)}) / {_numbers(p.std)}")
        if labels is not None:
            rest = len(labels) - 5
            out.line(f"Labels: {', '.join(labels[:5])}{f' and {rest} more' if rest > 0 else ''}")
        for name, output in states_of(self.source).items():
            out.line(f"State: the input {name} takes the output {output} of the call before")
        out.line()

    def _tree(self, values: Sequence[Stored], depth: int) -> Table:
        from onnx_convgrad.frontend.inspection import Stored

        rows = []
        for row in self.layers(values, depth):
            stored = row["member"] if isinstance(row["member"], Stored) else None
            named = row["glob"] == row["layer"] or (stored and stored.kind == "parameter" and row["level"])
            rows.append(
                [
                    "  " * row["level"] + row["layer"],
                    shape_text(stored.shape) if stored else "",
                    f"{row['parameters']:,}" if row["tensors"] else "",
                    f"{row['share']:.1%}" if row["tensors"] else "",
                    (stored and stored.reason) or ("" if named else row["glob"]),
                ]
            )
        columns = ["layer", "shape", "parameters", "share", "glob, or why not trained"]
        return Table(columns, rows, {2, 3}, whole={0, 4})

    def _show_training(self, out: Output) -> None:
        """Say what is trained by default, what is not and why, and which globs help."""
        trained = self.trained
        out.line(f"Trained by default: {self.numbers:,} numbers in {len(trained)} tensors.")
        reasons = Counter(v.reason for v in self.values if v.kind != "parameter")
        if reasons:
            out.line("Not trained:")
        for reason, count in reasons.most_common():
            out.line(f"  {count:>5}  {reason}")
        unclear = [v.name for v in self.values if v.kind == "unclear"]
        if unclear and trained:
            out.line(f"To train an unclear one, name it, too: --wrt parameters --wrt {shlex.quote(unclear[0])}")
        across = self.globs.across()
        if across:
            few = sorted(across, key=lambda glob: -len(across[glob]))[:6]
            out.line(f"In all layers: {', '.join(f'{glob} ({len(across[glob])})' for glob in few)}")
        if trained:
            out.line("In a shell, put globs in quotes: --freeze 'GLOB'.")

    def _results(self) -> Table:
        from onnx_convgrad.cli.rewrite import described

        results = [(node, v.name, described(v)) for node in self.base.graph for v in node.outputs if v.name]
        rows = [[n.op_type, d["dtype"] or "?", shape_text(d["shape"]), n.name or "", name] for n, name, d in results]
        return Table(["operator", "dtype", "shape", "node", "result"], rows, whole={3, 4})


def _fitting(values: Sequence[Stored]) -> int:
    """The largest depth at which the tree has few rows, at least 1."""
    from onnx_convgrad.frontend.inspection import tree

    root, deepest = tree(values), max((len(v.path) for v in values), default=1)
    too_deep = (depth for depth in range(2, deepest + 1) if sum(1 for _ in root.rows(depth)) > _ROWS)
    return next(too_deep, deepest + 1) - 1


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{v:.4g}' for v in values)}]" if len(values) > 1 else f"{values[0]:.4g}"
