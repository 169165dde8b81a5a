"""Bring a model of any ai.onnx opset from 7 to 28 to opset 21, so that one set of rules covers them all.

ONNX's own version converter needs declared shapes and a serialized model, and stops at foreign domains and 2 GB of weights.
This one works in place on onnx_ir, node by node, driven by the table in `converters`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnx_convgrad.autodiff.function_bodies import emit_body
from onnx_convgrad.autodiff.registry import lookup
from onnx_convgrad.autodiff.remedies import remedy
from onnx_convgrad.errors import ConvGradError, ModelError, UnsupportedCase
from onnx_convgrad.frontend.opset.converters import CONVERTERS, FUSED, PLAIN, Conversion
from onnx_convgrad.frontend.opset.converters_above_21 import widened
from onnx_convgrad.frontend.opset.newer import remember_newer
from onnx_convgrad.frontend.opset.rewriter import Converter, OpenEmitter, Rewriter
from onnx_convgrad.ir.emit import CANONICAL_OPSET
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import all_nodes, is_op, subgraphs
from onnx_convgrad.ir.passes import GraphPass

OLDEST_OPSET = 7
NEWEST_OPSET = 28

_IR_VERSION = 10
"""The IR version that introduced opset 21."""


class UpgradeOpset(GraphPass):
    """Bring a model without functions to opset 21, and write fused operators of ONNX Runtime with plain ones.

    Where there were fused operators, the shapes of all results are forgotten: those inferred around them are guesses. A
    model whose nodes mean the same at both opsets counts as unchanged: their shapes are known already.
    """

    def rewrite(self, model: ir.Model) -> bool:
        foreign = _has_fused(model)
        changed = upgrade(model)
        if foreign:
            for value in (v for node in model.graph if not node.domain for v in node.outputs):
                value.shape = None
        return changed


def upgrade(model: ir.Model) -> bool:
    """Rewrite `model`, which has no functions, in place to opset 21 without changing the values that it computes.

    Covers nested graphs and what ONNX Runtime fused. Graph outputs keep their names. The model is neither serialized nor
    copied, and of its weights only the `scales` and `sizes` of old Resize nodes are read.

    Returns:
        Whether a node was rewritten, or is of the oldest opset, where shape inference knows less.

    Raises:
        ModelError: The opset is outside 7..28, or some nodes have no equivalent at 21; the message lists all of them.
            The model is then half rewritten and of no use.
    """
    version = _opset(model)
    remember_newer(model, version, [node for node in model.graph if _is_newer(node, version)])
    _settle_ir_version(model)
    others = _without_rule(model)
    walk = _Walk(model, version)
    walk.visit(model.graph)
    model.opset_imports.pop("ai.onnx", None)
    model.opset_imports[""] = CANONICAL_OPSET
    if walk.problems:
        problems = [*walk.problems, *others]
        raise ModelError(f"{len(problems)} node(s) cannot be expressed at opset {CANONICAL_OPSET}:", lines=problems)
    return walk.changed or version == OLDEST_OPSET


def _has_fused(model: ir.Model) -> bool:
    return any((node.domain, node.op_type) in FUSED for node in all_nodes(model.graph))


def _without_rule(model: ir.Model) -> list[str]:
    """The nodes of other domains that neither a converter nor a rule covers: a refused model is refused for them, too."""
    found = []
    for node in all_nodes(model.graph):
        key = (node.domain, node.op_type)
        if node.domain and key not in FUSED and lookup(*key) is None:
            found.append(f"{_name(node)} ({node.domain}::{node.op_type}): no rule covers this operator. {remedy(node)}")
    return found


def _name(node: ir.Node) -> str:
    return node.name or f"the producer of {', '.join(str(o.name) for o in node.outputs)}"


class _Walk:
    """One pass over a model of opset `version`. Problems are collected, so that all of them can be reported."""

    def __init__(self, model: ir.Model, version: int) -> None:
        self._version = version
        self._names = Namespace.of_values(model.graph)
        self._emitters: dict[ir.Graph, OpenEmitter] = {}
        self._fused = _has_fused(model)
        self.problems: list[str] = []
        self.changed = False

    def visit(self, nodes: Iterable[ir.Node]) -> None:
        """Rewrite nodes and everything nested in them."""
        # A snapshot, since inserted nodes are canonical already.
        for node in list(nodes):
            for _, graph in subgraphs(node):
                self.visit(graph)
            fused = FUSED.get((node.domain, node.op_type))
            if node.domain and fused is None:
                continue
            version, op_type = node.version or self._version, node.op_type
            try:
                if fused is not None:
                    node.version = None
                    self._convert(node, fused)
                if fused is None or node.version:
                    self._rewrite(node, node.version or version)
                self._infer(node)
                continue
            except UnsupportedCase as problem:
                reason = problem.message.removesuffix(".")
            except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as problem:
                if isinstance(problem, ConvGradError):
                    raise
                reason = f"its operands or attributes are not valid ({problem})"
            self.problems.append(f"{_name(node)} ({op_type}, opset {version}): {reason}. {remedy(node)}".rstrip())

    def _rewrite(self, node: ir.Node, version: int) -> None:
        op_type = node.op_type
        if op_type in PLAIN:
            self._convert(node, PLAIN[op_type])
        for downward in reversed(_newer_steps(node.op_type, version)):
            self._convert(node, downward.convert)
        at = version
        # Looked up again after each step, because a step may turn the node into another operator.
        while (upward := _next_step(node.op_type, at)) is not None:
            self._convert(node, upward.convert)
            at = upward.since
        if _is_canonical(node.op_type):
            node.version = None
            if version > CANONICAL_OPSET and node.op_type == op_type:
                if _unknown_types(node) == {ir.DataType.BFLOAT16}:
                    self._convert(node, widened)
                for dtype in _unknown_types(node):
                    raise UnsupportedCase(f"at opset {CANONICAL_OPSET} it does not take {dtype.name}")
        else:
            self._write_out(node, version)

    def _write_out(self, node: ir.Node, version: int) -> None:
        """Replace an operator that is newer than opset 21 by its function body, whose nodes are rewritten in turn."""
        body_version = version

        def convert(h: Rewriter) -> list[ir.Value | None]:
            nonlocal body_version
            results, body_version = emit_body(h.e, h, version)
            return results

        emitted = self._convert(node, convert)
        for inner in (*emitted, node):
            inner.version = body_version
        self.visit((*emitted, node))

    def _convert(self, node: ir.Node, convert: Converter) -> Sequence[ir.Node]:
        """Call a converter, and return what it emitted before the node."""
        self.changed = True
        return Rewriter(node, self._emitter(node)).convert(convert)

    def _emitter(self, node: ir.Node) -> OpenEmitter:
        """The emitter of the graph of a node, which writes before it."""
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        e = self._emitters.get(graph)
        if e is None:
            e = self._emitters[graph] = OpenEmitter(graph)
            e.names = self._names  # values of nested graphs must not share a name with those around them
        e.anchor = node
        return e

    def _infer(self, node: ir.Node) -> None:
        """Type the results of a node behind a fused one, where inference ended: the next fused one may need their ranks."""
        if self._fused and not node.domain and any(v.dtype is None or v.shape is None for v in node.outputs):
            self._emitter(node).infer(node)


def _is_newer(node: ir.Node, version: int) -> bool:
    """Whether a node of a model of this opset is written with other operators at the canonical one."""
    changed = _newer_steps(node.op_type, version) or not _is_canonical(node.op_type)
    return not node.domain and version > CANONICAL_OPSET and bool(changed)


def _newer_steps(op_type: str, version: int) -> list[Conversion]:
    return [step for step in CONVERTERS.get(op_type, ()) if CANONICAL_OPSET < step.since <= version]


def _next_step(op_type: str, version: int) -> Conversion | None:
    return next((step for step in CONVERTERS.get(op_type, ()) if version < step.since <= CANONICAL_OPSET), None)


@functools.cache
def _is_canonical(op_type: str) -> bool:
    try:
        return not onnx.defs.get_schema(op_type, CANONICAL_OPSET, "").deprecated
    except onnx.defs.SchemaError:
        return False


def _unknown_types(node: ir.Node) -> set[ir.DataType]:
    """The types of operands that the operator takes in a newer opset only."""
    allowed, found = _operand_types(node.op_type), set()
    for position, value in enumerate(node.inputs):
        types = allowed[min(position, len(allowed) - 1)] if allowed else frozenset()
        dtype = value.dtype if value is not None and isinstance(value.type, ir.TensorType) else None
        if types and dtype is not None and f"tensor({dtype.name.lower()})" not in types:
            found.add(dtype)
    return found


@functools.cache
def _operand_types(op_type: str) -> tuple[frozenset[str], ...]:
    """The types that each operand may have at the canonical opset."""
    schema = onnx.defs.get_schema(op_type, CANONICAL_OPSET, "")
    return tuple(frozenset(formal.types) for formal in schema.inputs)


def _opset(model: ir.Model) -> int:
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if version is None:
        if any(node.domain == "" and node.version is None for node in all_nodes(model.graph)):
            raise ModelError("The model uses operators of ai.onnx without importing an opset of it.")
        return CANONICAL_OPSET
    if version < OLDEST_OPSET:
        raise ModelError(
            f"The model has opset {version}; the oldest supported one is {OLDEST_OPSET}. "
            f"Convert it first: onnx.version_converter.convert_version(model, {CANONICAL_OPSET})."
        )
    if version > NEWEST_OPSET:
        raise ModelError(f"The model has opset {version}; the newest supported one is {NEWEST_OPSET}.")
    return version


def _settle_ir_version(model: ir.Model) -> None:
    """Set the IR version that belongs to the opset: runtimes refuse newer ones than they know, needed or not."""
    if not model.device_configurations:
        model.ir_version = _IR_VERSION
    model.ir_version = max(model.ir_version, _IR_VERSION)


# -- opsets before 7 (2017), with ONNX's own version converter ---------------------------------------------------------


class ConvertAncient(GraphPass):
    """Bring a model to opset 8 if its opset is older than 7.

    Raises:
        ModelError: The converter refuses the model.
    """

    def rewrite(self, model: ir.Model) -> bool:
        version, wanted = model.opset_imports.get("", OLDEST_OPSET), OLDEST_OPSET + 1
        if version >= OLDEST_OPSET:
            return False
        try:
            _align_slopes(model)
            converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), wanted))
        except Exception as problem:
            raise ModelError(
                f"The model has opset {version}, and ONNX's version converter cannot bring it to {wanted}: {problem}."
            ) from problem
        model.graph, model.ir_version = converted.graph, converted.ir_version
        return True


def _align_slopes(model: ir.Model) -> None:
    """Give the slopes of a PRelu trailing axes: before opset 7 they went along the channels, which the converter ignores."""
    nodes = [n for n in model.graph if is_op(n, "PRelu") and n.inputs[1] is not None and n.inputs[1].shape != (1,)]
    ranks = {}
    if nodes:
        inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model)).graph
        for info in (*inferred.input, *inferred.value_info, *inferred.output):
            ranks[info.name] = len(info.type.tensor_type.shape.dim)
    for node in nodes:
        x, slope = node.inputs[:2]
        rank = ranks.get("" if x is None else x.name or "")
        if rank is None:
            raise ValueError(f"the rank of the operand of PRelu {node.name!r} is not known")
        if rank > 2:
            aligned = ir.Node("", "Unsqueeze", [slope], [ir.AttrInt64s("axes", list(range(1, rank - 1)))])
            aligned.outputs[0].name = f"{node.outputs[0].name}_slope"
            model.graph.insert_before(node, aligned)
            node.replace_input_with(1, aligned.outputs[0])
