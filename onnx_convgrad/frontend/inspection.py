"""Describe the stored values of a model: which are trained by default, and where they are in the tree of its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnx_convgrad.base.names import literal, matches
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.roles import LAYOUT_CHANGES, Kind, Role, parameters, readers
from onnx_convgrad.frontend.selection import original_names, warn_of_derivatives
from onnx_convgrad.ir.nodes import all_nodes

_NAMELESS = re.compile(
    r"\d+|\w+::\w+_\d+|(val|const|constant|initializer|tensor|variable|weight|param|p)_?\d+", re.IGNORECASE
)
"""Names that exporters number: `413`, `onnx::Conv_123`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored value of a model.

    Attributes:
        path: The parts of its name, each with the separator behind it: `layer1.`, `0.`, `weight`. A value whose name is a
            number has those of the node that reads it.
        kind: Its role; parameters are trained by default.
        reason: Why it is not trained; empty for parameters.
        nodes: Names of the nodes that read it.
        originals: Names that it had before the exporter stored it under a number; they select it too.
    """

    name: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    reason: str
    nodes: tuple[str, ...]
    originals: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of numbers."""
        return math.prod(self.shape)


@dataclass(slots=True)
class NameTree:
    """A part of the tree of names: its stored values, and the parts in it by name."""

    parts: dict[str, NameTree] = field(default_factory=dict)
    values: list[Stored] = field(default_factory=list)

    def everything(self) -> Iterator[Stored]:
        """All values of this part and of those in it."""
        yield from self.values
        for part in self.parts.values():
            yield from part.everything()

    def rows(self, depth: int, level: int = 0) -> Iterator[tuple[int, str, NameTree | Stored]]:
        """Level, label and member of every row of the tree down to a depth; a part with one member shares its row."""
        for value in self.values:
            yield level, value.path[-1], value
        for name, part in self.parts.items():
            label, inner = name, part
            while len(inner.parts) + len(inner.values) == 1:
                if inner.values:
                    yield level, label + inner.values[0].path[-1], inner.values[0]
                    break
                ((following, inner),) = inner.parts.items()
                label += following
            else:
                yield level, label.rstrip("./"), inner
                if level + 1 < depth:
                    yield from inner.rows(depth, level + 1)


def tree(values: Sequence[Stored]) -> NameTree:
    """The layers of some stored values."""
    root = NameTree()
    for value in values:
        layer = root
        for part in value.path[:-1]:
            layer = layer.parts.setdefault(part, NameTree())
        layer.values.append(value)
    return root


# -- stored values -----------------------------------------------------------------------------------------------------


def stored_values(model: Model) -> list[Stored]:
    """The stored values of a model, in the order of their first use."""
    graph = model.canonical.graph
    warn_of_derivatives(graph, parameters(graph))
    order = {node: i for i, node in enumerate(all_nodes(graph))}
    first = {v: min((order.get(use.node, 0) for use in v.uses()), default=0) for v in graph.initializers.values()}
    roles = model.roles
    return [_described(value, roles[value.name or ""]) for value in sorted(first, key=first.__getitem__)]


def undescribed(source: ir.Model, problem: ConvGradError) -> list[Stored]:
    """The stored values of a model that cannot be loaded, with a warning of its `problem`."""
    warn(f"Nothing in this model can be trained: {problem.message}")
    return [_described(v, Role("unclear", "not known")) for v in source.graph.initializers.values()]


def _described(value: ir.Value, role: Role) -> Stored:
    reading = list(dict.fromkeys(readers(value)))
    shape = tuple(d for d in value.shape or () if isinstance(d, int))
    dtype = str(value.dtype.numpy()) if value.dtype else "?"
    nodes = tuple(node.name for node in reading if node.name)
    originals = tuple(original_names(value))
    reason = "" if role.kind == "parameter" else role.reason
    return Stored(value.name or "", _path(value, reading, originals), dtype, shape, role.kind, reason, nodes, originals)


def _path(value: ir.Value, reading: Sequence[ir.Node], originals: Sequence[str]) -> tuple[str, ...]:
    """The parts of a value's name, or of its original name; or those of the node that reads it, and the name."""
    name = value.name or ""
    if not _NAMELESS.fullmatch(name):
        return _parts(name) or (name,)
    if originals:
        return (*_parts(originals[0])[:-1], name)
    node = next((n for n in reading if n.op_type not in LAYOUT_CHANGES), reading[0] if reading else None)
    if node is None or not node.name:
        return (name,)
    scopes = node.name.strip("/").split("/")
    parts = [  # PyTorch repeats the outer scope: layer1/layer1.0/conv1
        scope.removeprefix(f"{before}.") for before, scope in zip(["", *scopes], scopes, strict=False)
    ]
    if len(parts) > 1 and re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", parts[-1]):
        parts = parts[:-1]
    return (*(f"{part}/" for part in parts), name)


def _parts(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[./]*[^./]+[./]?", name))


# -- globs -------------------------------------------------------------------------------------------------------------


class Globs:
    """Find the glob that means certain parameters, and no others, in `wrt` and `freeze`."""

    def __init__(self, values: Sequence[Stored]) -> None:
        self.trained = [v for v in values if v.kind == "parameter"]
        self.taken = {v.name for v in values if v.kind != "constant"}

    def of(self, values: Sequence[Stored]) -> str:
        """The glob of the parameters among some values; empty if there is none.

        It is a common beginning of their names, or else of the names of the nodes that read them.
        """
        wanted = {v.name for v in values if v.kind == "parameter"}
        if not wanted:
            return ""
        if len(wanted) == 1:
            return literal(*wanted).replace(",", "?")  # a comma separates names on the command line
        chosen = [v for v in self.trained if v.name in wanted]
        names = [_names(v)[-1] for v in chosen]
        for glob in _beginnings(names):
            if self._by_name(glob) == wanted:
                return min([g for g in _shorter(glob) if self._by_name(g) == wanted], key=len, default=glob)
        for glob in _beginnings([node for v in chosen for node in v.nodes]):
            read = {v.name for v in self.trained if any(matches(glob, node) for node in v.nodes)}
            if read == wanted and not any(matches(glob, name) for name in self.taken):
                return glob
        return ""

    def _by_name(self, glob: str) -> set[str]:
        return {v.name for v in self.trained if any(matches(glob, name) for name in _names(v))}

    def across(self) -> dict[str, list[Stored]]:
        """Globs for parameters whose names end alike in several layers, such as `*.bias`."""
        ends: dict[str, list[Stored]] = {}
        for value in self.trained:
            found = re.search(r"[./][^./]+$", value.name)
            if found and not _NAMELESS.fullmatch(value.name):
                ends.setdefault(f"*{literal(found[0])}", []).append(value)
        return {glob: values for glob, values in ends.items() if 1 < len(values) < len(self.trained)}


_LONG = 24
"""Smallest length of a glob that is replaced by a shorter one."""


def _shorter(glob: str) -> Iterator[str]:
    """Globs for the ends of a long one: `*.layer_0.*` for `encoder.layers.layer_0.*`."""
    if len(glob) > _LONG:
        yield from (f"*{glob[found.start() :]}" for found in re.finditer(r"[./]", glob[:-2]) if found.start())


def _names(value: Stored) -> tuple[str, ...]:
    return (value.name, *value.originals)


def _beginnings(names: Sequence[str]) -> Iterator[str]:
    """The globs of common beginnings of names that end with a separator, the shortest first."""
    first, last = min(names, default=""), max(names, default="")
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    for found in re.finditer(r"[./]", first[:common]):
        if found.start():
            yield f"{literal(first[: found.end()])}*".replace(",", "?")
