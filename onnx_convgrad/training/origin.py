"""Find the node in which the first number of a step that is not finite arises; only when training has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.runtime import run

Arrays = Mapping[str, np.ndarray]

OUTGROWN = "Numbers outgrow their type there: scale the data"
"""Start of the remedy for numbers that become too large."""

_CORRECT = "Correct it in the file of the model, or in the data."


@dataclass(frozen=True, slots=True)
class Origin:
    """The place at which numbers that are not finite arise.

    Attributes:
        text: A sentence.
        hint: The likely remedy.
        outgrown: Whether numbers have become too large for float32, for which the learning rate may be the reason.
    """

    text: str
    hint: str
    outgrown: bool = False


def origin_of(gradients: ir.Model, batch: Arrays, values: Arrays) -> Origin | None:
    """The origin of the numbers in a step that are not finite; `None` if its gradients are, or it cannot be run.

    `gradients` is the graph of the gradients, and `values` are parameters and state before the step.
    """
    model = gradients.clone()
    graph = model.graph
    inputs = {v.name or "": v for v in graph.inputs}
    feeds = {name: array for name, array in {**values, **batch}.items() if name in inputs}
    if any(name not in feeds and v.const_value is None for name, v in inputs.items()):
        return None
    made = [v for node in graph for v in node.outputs if v.name and v.dtype is not None and v.dtype.is_floating_point()]
    graph.outputs.clear()
    graph.outputs.extend(made)
    try:
        found = run(model, feeds, providers="cpu", optimize=False)
    except (ConvGradError, MemoryError):
        return None
    stored = {name: v.const_value.numpy() for name, v in graph.initializers.items() if v.const_value is not None}
    known = {**stored, **feeds, **found}
    kinds = {
        name: (bool(np.isnan(a).any()), bool(np.isinf(a).any())) for name, a in known.items() if a.dtype.kind == "f"
    }

    def first(kind: int, within: set[ir.Node] | None = None) -> ir.Node | None:
        """The first node that makes NaN (kind 0) from operands without, or infinities (1) from finite operands."""
        for node in graph:
            before = [kinds.get(v.name or "", (False, False)) for v in node.inputs if v is not None]
            after = [kinds.get(v.name or "", (False, False)) for v in node.outputs]
            fresh = any(a[kind] for a in after) and not any(b[0] or (kind and b[1]) for b in before)
            if fresh and (within is None or node in within):
                return node
        return None

    nan, infinite = first(0), None
    if nan is None or any(kinds.get(v.name or "", (False, False))[1] for v in nan.inputs if v is not None):
        infinite = first(1, None if nan is None else _behind(nan))
    leaves = (*graph.inputs, *graph.initializers.values()) if nan is None else nan.inputs
    held = next((v.name for v in leaves if v is not None and v.producer() is None and v.name in kinds
                 and kinds[v.name][nan is not None]), None)  # fmt: skip
    if held is not None and infinite is None:
        what = "NaN" if nan is None else "infinite numbers"
        return Origin(f" The value {held!r} holds {what} before any node has run.", _CORRECT)
    if nan is None and infinite is None:
        return None
    return _described(nan, infinite)


def _behind(node: ir.Node) -> set[ir.Node]:
    """The nodes that a node depends on."""
    found: set[ir.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [p for v in current.inputs if v is not None and (p := v.producer()) is not None]
    return found


def _described(nan: ir.Node | None, infinite: ir.Node | None) -> Origin:
    source = nan if infinite is None else infinite
    assert source is not None
    text = f"NaN arises in node {nan.name!r} ({nan.op_type})" if nan is not None else ""
    if infinite is not None:
        place = f"node {infinite.name!r} ({infinite.op_type})"
        text += f", from the infinite result of {place}" if text else f"The first infinite number arises in {place}"
    if any(node is not None and (rule := rule_of(node)) and rule.poles for node in (source, nan)):
        return Origin(
            f" {text}.",
            "Keep the operand away from the edge of its range, where the function or its derivative is infinite: add a "
            "small number, or take the Max with one. A lower learning rate does not help.",
        )
    if source.outputs[0].dtype == ir.DataType.FLOAT16:
        return Origin(
            f" {text}.",
            "float16 holds numbers up to 65,504: scale the data, or build the program with precision='bfloat16' or "
            "'float32' (--precision).",
        )
    return Origin(f" {text}.", f"{OUTGROWN}, or try a lower learning rate (--lr) or --clip-norm.", outgrown=True)
