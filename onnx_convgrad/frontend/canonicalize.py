"""Bring any model into the one form that the rules see, without changing what it computes.

Local functions inlined, ai.onnx at opset 21, constants as initializers, initializers no longer inputs, dimension names
made honest, shapes inferred as far as they can be known, and sizes computed from them folded.
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import index
from typing import SupportsIndex

import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes import common
from onnx_shape_inference import infer_symbolic_shapes

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.branches import take_known_branches
from onnx_convgrad.frontend.exporters.pytorch import tie_copies
from onnx_convgrad.frontend.gradient_edges import GRADIENT, TRAINING_DOMAIN, label
from onnx_convgrad.frontend.known_sequences import use_members
from onnx_convgrad.frontend.node_forms import refuse_malformed_nodes
from onnx_convgrad.frontend.opset.upgrade import OLDEST_OPSET, upgrade
from onnx_convgrad.frontend.plain_windows import use_plain_windows
from onnx_convgrad.frontend.shapes import shape_rules
from onnx_convgrad.frontend.shapes.fold_sizes import fold_sizes
from onnx_convgrad.frontend.shapes.infer_ranks import tell_ranks
from onnx_convgrad.ir.constants import forget_constants
from onnx_convgrad.ir.namespace import Namespace, rename
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import mark_lifted
from onnx_convgrad.ir.serialize import skeleton

__all__ = ["canonicalize"]

logger = logging.getLogger(__name__)

InputShapes = Mapping[str, Sequence[int | str | None]]

_NO_NAME = frozenset({"", "?", "None", "none", "unk", "-1", "dynamic", "Unknown", "unknown"})
"""Dimension names that exporters give to every unknown size: equal names say nothing there."""

_BLOCKED = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
"""Domains of ONNX Runtime's own layouts, which optimization level "all" writes."""


def canonicalize(model: ir.Model, input_shapes: InputShapes | None = None, *, fold: bool = True) -> ir.Model:
    """Bring `model` to canonical form and return it. Callers pass a clone: it is rewritten in place where possible.

    With `fold`, integers that follow from constants and static sizes become constants. Parts of a graph that are to be
    computed for other sizes, too, need them as they are.

    Raises:
        ModelError: The model is not a usable ONNX model, or its opset has no equivalent at 21.
        ArgumentError: `input_shapes` names an unknown input or contradicts a rank.
    """
    _refuse_nothing(model.graph)
    _refuse_blocked_layout(model)
    refuse_malformed_nodes(model)
    model = _lift_ancient(model)
    model = _inline(model)
    _refuse_unbound_gradients(model.graph)
    _refuse_undefined_values(model.graph)
    _sort(model.graph)
    model.graph.name = model.graph.name or "main_graph"  # ONNX demands one, the runtime does not
    common.RemoveInitializersFromInputsPass()(model)
    tie_copies(model.graph)
    constants = {v.name for node in model.graph if node.op_type == "Constant" for v in node.outputs}
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for value in model.graph.initializers.values():
        mark_lifted(value, from_node=value.name in constants)
    _name_values(model.graph)
    _rename_shapes_of_the_runtime(model.graph)
    if input_shapes:
        _override_shapes(model.graph, input_shapes)
    _clean_dimensions(model.graph)
    before = model.opset_imports.get("", 0)
    whole = all(node.domain == "" for node in model.graph.all_nodes())
    declared = _forget_shapes(model.graph)
    if fold:
        fold_sizes(model.graph)
    _infer_through_branches(model, declared, fold=fold)
    if not input_shapes and _recall_shapes(declared):
        _infer(model)
    try:
        upgrade(model)
    except ValueError as problem:
        raise ModelError(str(problem)) from problem
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if not whole:  # what was guessed of operators that are now taken apart, and of what follows them, is forgotten
        _forget_shapes(model.graph)
    if use_members(model.graph) or before != model.opset_imports.get("", 0) or not whole:
        _infer(model)
    if not whole and not input_shapes and _recall_shapes(declared):
        _infer(model)
    told: set[ir.Value] = set()
    while (found := tell_ranks(model.graph)) - told:  # inference forgets some, such as that of a Squeeze without axes
        told |= found
        _infer(model)
    if fold:
        fold_sizes(model.graph)
        use_plain_windows(model.graph)
    return model


def _refuse_nothing(graph: ir.Graph) -> None:
    """An empty or truncated file is a valid protobuf message, without a graph."""
    if not (graph.inputs or graph.outputs or len(graph)):
        raise ModelError("The model is empty: it has no node, no input and no output. The file may be cut off.")


def _refuse_blocked_layout(model: ir.Model) -> None:
    """ONNX Runtime rearranges weights for one machine's registers; nothing tells the original order from the file."""
    blocked = [node for node in model.graph.all_nodes() if node.domain in _BLOCKED]
    if blocked:
        first = blocked[0]
        raise ModelError(
            f"{len(blocked)} nodes are in a layout that ONNX Runtime made for one machine,"
            f" the first {first.name or first.outputs[0].name!r} ({first.domain}::{first.op_type}).",
            hint="Give the model from before this optimization, or one optimized with"
            " graph_optimization_level=ORT_ENABLE_EXTENDED at most.",
        )


def _refuse_unbound_gradients(graph: ir.Graph) -> None:
    """The operator Gradient refers to tensors by names, which nothing here keeps."""
    found = [n for n in graph.all_nodes() if (n.domain, n.op_type) == (TRAINING_DOMAIN, GRADIENT)]
    if found:
        raise ModelError(
            f"{len(found)} of the model's nodes, the first {label(found[0])}, are Gradient of {TRAINING_DOMAIN}.",
            hint="Apply onnx_convgrad.lower_gradient_ops to the model first, or `onnx-convgrad lower`.",
        )


def _sort(graph: ir.Graph) -> None:
    """ONNX Runtime takes nodes in any order, and so must this."""
    made: set[ir.Node | None] = {None}
    for node in graph:
        if any(v is not None and v.producer() not in made for v in node.inputs):
            try:
                graph.sort()
            except ValueError as problem:
                name = node.name or node.outputs[0].name
                raise ModelError(f"Node {name!r} ({node.op_type}) reads what depends on its own result.") from problem
            return
        made.add(node)


def _refuse_undefined_values(graph: ir.Graph) -> None:
    """A node of the main graph that reads what nothing makes: the runtime refuses it too, in other words."""
    given = {*graph.inputs, *graph.initializers.values()}
    for output in graph.outputs:
        if output.producer() is None and output not in given:
            raise ModelError(f"The output {output.name!r} is neither an input, nor an initializer, nor made by a node.")
    for node in graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and value not in given:
                raise ModelError(
                    f"Node {node.name or node.outputs[0].name!r} ({node.op_type}) reads {value.name!r}, which is neither an"
                    " input, nor an initializer, nor the result of a node.",
                    hint="Make it one of them: onnx.checker.check_model tells what else the model lacks.",
                )


def _lift_ancient(model: ir.Model) -> ir.Model:
    """Opsets before 7 (2017) go through ONNX's own version converter first."""
    version = model.opset_imports.get("", OLDEST_OPSET)
    if version >= OLDEST_OPSET:
        return model
    try:
        _spread_slopes(model)
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), OLDEST_OPSET + 1))
    except Exception as problem:
        raise ModelError(
            f"The model has opset {version}, and ONNX's version converter cannot bring it to {OLDEST_OPSET + 1}: {problem}."
        ) from problem


def _spread_slopes(model: ir.Model) -> None:
    """PRelu took a vector of slopes for one per channel, whatever followed the channels, which the converter leaves."""
    found = [n for n in model.graph if is_op(n, "PRelu") and n.inputs[1] is not None and n.inputs[1].shape != (1,)]
    ranks = {}
    if found:
        inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model)).graph
        for info in (*inferred.input, *inferred.value_info, *inferred.output):
            ranks[info.name] = len(info.type.tensor_type.shape.dim)
    for node in found:
        x, slope = node.inputs[:2]
        rank = ranks.get("" if x is None else x.name or "")
        if rank is None:
            raise ValueError(f"the rank of what PRelu {node.name!r} reads is not known")
        if rank > 2:
            spread = ir.Node("", "Unsqueeze", [slope], [ir.AttrInt64s("axes", list(range(1, rank - 1)))])
            spread.outputs[0].name = f"{node.outputs[0].name}_slope"
            model.graph.insert_before(node, spread)
            node.replace_input_with(1, spread.outputs[0])


def _inline(model: ir.Model) -> ir.Model:
    """Without functions; those of another opset than the model's are converted to it by ONNX's own inliner."""
    if not model.functions:
        return model
    try:
        common.InlinePass()(model)
    except ValueError:
        return ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model), convert_version=True))
    return model


def _name_values(graph: ir.Graph) -> None:
    """Nodes without names get one, so that messages and node names can refer to them; a name's second node, another."""
    given = Counter(node.name for node in graph)
    taken = set(given)
    for number, node in enumerate(graph):
        if node.name and given[node.name] == 1:
            continue
        given[node.name] -= 1
        name = node.name or f"{node.op_type}_{number}"
        while name in taken:  # the runtime refuses two of one name
            name = f"{name}_{number}"
        taken.add(name)
        node.name = name


_RUNTIME_NAMES = re.compile(r"gemm_(input|output)_shape(_token_\d+)?")
"""What ONNX Runtime's optimizer calls shapes that it adds; it does not load a file in which it finds them and adds more."""


def _rename_shapes_of_the_runtime(graph: ir.Graph) -> None:
    names = Namespace.of_values(graph)
    for name, value in list(graph.initializers.items()):
        if _RUNTIME_NAMES.fullmatch(name) and value.dtype == ir.DataType.INT64:
            rename(value, names.claim(f"kept_{name}"))


_MOST = 2**31
"""No axis is as long."""


def _override_shapes(graph: ir.Graph, shapes: InputShapes) -> None:
    inputs = {v.name: v for v in graph.inputs if v.name}
    if not isinstance(shapes, Mapping):
        raise ArgumentError(f"input_shapes must map names of inputs to their sizes, not {shapes!r}.")
    check_names(list(shapes), list(inputs), "input")
    for name, dims in shapes.items():
        value = inputs[name]
        known = (SupportsIndex, str, type(None))
        if isinstance(dims, str) or not isinstance(dims, Iterable) or not all(isinstance(d, known) for d in dims):
            raise ArgumentError(f"The shape of input {name!r} must be a list of sizes, symbols and None, not {dims!r}.")
        if any(isinstance(d, SupportsIndex) and not 0 <= index(d) < _MOST for d in dims):
            raise ArgumentError(
                f"Input {name!r} cannot have the shape {list(dims)!r}: sizes are from 0 to {_MOST - 1}."
            )
        if value.shape is not None and len(value.shape) != len(dims):
            raise ArgumentError(f"Input {name!r} has rank {len(value.shape)}, but {len(dims)} sizes were given.")
        value.shape = ir.Shape([index(d) if isinstance(d, SupportsIndex) else d for d in dims])


def _forget_shapes(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Drop declared shapes of what inference can find: exporters write some that the runtime does not produce."""
    declared = {}
    for node in graph:
        if node.domain:
            continue
        for value in node.outputs:
            if value.shape is not None:
                declared[value] = value.shape
                value.shape = None
    return declared


def _recall_shapes(declared: Mapping[ir.Value, ir.Shape]) -> bool:
    """Take a declared shape back where inference found none. Whether there was one."""
    missing = {value: shape for value, shape in declared.items() if value.shape is None}
    for value, shape in missing.items():
        value.shape = shape
    return bool(missing)


def _clean_dimensions(graph: ir.Graph) -> None:
    """Make `?` and the like anonymous, and negative sizes unknown; distinct unknowns stay distinct."""
    for value in _values(graph):
        if value.shape is None:
            continue
        dims = [_clean(d) for d in value.shape]
        if any(new is not old for new, old in zip(dims, value.shape, strict=True)):
            value.shape = ir.Shape(dims)


def _clean(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    if isinstance(dim, int):
        return None if dim < 0 else dim
    name = dim.value
    if name is None:
        return dim
    return dim if name not in _NO_NAME and _parsable(name) else None


@cache
def _parsable(name: str) -> bool:
    """Whether shape inference can read the name of a dimension, as an expression of symbols."""
    try:
        ir.SymbolicDim(name).free_symbols()
    except ValueError:
        return False
    return True


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs
    for sub in graph.subgraphs():
        yield from sub.inputs


def _infer(model: ir.Model) -> None:
    """Symbolic shape inference, then ONNX's own for what it could not find."""
    shape_rules.install()
    level = logging.getLogger("onnx_shape_inference").level
    logging.getLogger("onnx_shape_inference").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            infer_symbolic_shapes(model, policy="refine", warn_on_missing=False)
    except Exception as problem:  # noqa: BLE001 - an inference bug must not refuse a model; partial results stay
        logger.info("Symbolic shape inference stopped: %s", problem)
        _infer_with_onnx(model)
    else:
        if any(v.dtype is None or v.shape is None for node in model.graph for v in node.outputs):
            _infer_with_onnx(model)
    finally:
        logging.getLogger("onnx_shape_inference").setLevel(level)


def _infer_through_branches(model: ir.Model, declared: dict[ir.Value, ir.Shape], *, fold: bool) -> None:
    """Infer shapes, which decide which branch an If takes, which has shapes to infer."""
    while take_known_branches(model.graph, declared) and fold:
        fold_sizes(model.graph)
    again = True
    while again:
        _infer(model)
        forget_constants(model.graph)
        again = take_known_branches(model.graph, declared)
        if again and fold:
            fold_sizes(model.graph)


def _infer_with_onnx(model: ir.Model) -> None:
    """Take dtypes and shapes that only ONNX's inference knows (types through If bodies, for one)."""
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton(model), data_prop=True)
    except Exception as problem:  # noqa: BLE001 - as above
        logger.info("onnx.shape_inference stopped: %s", problem)
        return
    known = {info.name: info.type.tensor_type for info in (*inferred.graph.value_info, *inferred.graph.output)}
    fresh = _fresh_dimensions(model.graph)
    for node in model.graph:
        for value in node.outputs:
            info = known.get(value.name or "")
            if info is None:
                continue
            if value.dtype is None and info.elem_type:
                value.dtype = ir.DataType(info.elem_type)
            if value.shape is None and info.HasField("shape"):
                dims = info.shape.dim
                value.shape = ir.Shape([d.dim_value if d.HasField("dim_value") else next(fresh) for d in dims])


def _fresh_dimensions(graph: ir.Graph) -> Iterator[str]:
    """Names that no dimension has: symbolic inference stops at dimensions without one."""
    taken = {d.value for v in _values(graph) if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim)}
    return (name for number in itertools.count() if (name := f"_u{number}") not in taken)
