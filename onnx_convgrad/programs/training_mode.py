"""The training mode of a training program: unbiased running statistics outside the nodes, repeatable Dropout masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.numbers import LARGEST
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter, known
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.modes import (
    drop,
    dropped_share,
    original,
    use_batch_statistics,
    use_stored_statistics,
    warn_of_bodies,
)
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.masks import Masks, dropouts
from onnx_convgrad.programs.plan import ProgramPlan

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def set_training(draft: Draft, plan: ProgramPlan, manifest: Manifest, *, together: bool) -> dict[str, ir.Value]:
    """Switch BatchNormalization, except frozen nodes, and Dropout to training mode.

    A statistic that several nodes share is updated by one after the other. Running variances average variances with the
    denominator n - 1 (as PyTorch and TensorFlow do) or, as the plan says, n (as ONNX defines the operator). In place of
    narrow statistics their masters are averaged. With `together`, the statistics are those of the samples of all ranks: see
    `programs.exchanges`. The Dropout masks depend on the random state; a node whose ratio is known at run time only draws
    its mask with ONNX Runtime's own generator.

    Returns:
        The next values of statistics and random state by name.
    """
    warn_of_bodies(draft.graph, plan.frozen)
    draft.restart()  # nodes are emitted before others that computed the same
    entry = next((s for s in manifest.state if s.kind == "random"), None)
    state = None if entry is None else draft.input(entry, plan.first(entry))
    wide = {s.of or "": draft.input(s, plan.first(s)) for s in manifest.state if s.kind == "wide statistic"}
    following = _switched(draft, plan, state, wide, together=together)
    following |= {s.name: following[s.of] for s in manifest.state if s.kind == "wide statistic" and s.of}
    for name in plan.statistics():
        if following[name].dtype != draft.values[name].dtype:
            with draft.named(f"{name}/rounded"):
                following[name] = _rounded(draft.e, following[name], draft.values[name])
    if entry is not None and state is not None:
        with draft.named("masks"):
            following[entry.name] = draft.e.add(state, 1)
    draft.restart()
    return following


def _switched(
    draft: Draft, plan: ProgramPlan, state: ir.Value | None, wide: Mapping[str, ir.Value], *, together: bool
) -> dict[str, ir.Value]:
    """Switch all nodes; return the next value of each running statistic that is stored, float32 for a narrow one."""
    graph, e = draft.graph, draft.e
    statistics = _Statistics(e, unbiased=plan.unbiased, together=together, wide=wide)
    nodes = list(graph)
    masked = {node: place for place, node in enumerate(dropouts(graph))} if state is not None else {}
    masks = None
    if state is not None and masked:
        e.anchor = nodes[0]
        with draft.named("masks"):
            masks = Masks(e, state, len(masked))
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if is_op(node, "BatchNormalization"):
            if node.name in plan.frozen:
                use_stored_statistics(node)
            else:
                with draft.named(f"{node.name}/statistics"):
                    statistics.update(node, following)
        elif node in masked and masks is not None:
            e.anchor = node
            with draft.named(node.name or "dropout"):
                _apply_mask(e, node, masks, masked[node])
        elif is_op(node, "Dropout"):
            drop(graph, node, e.names)
    graph.remove(masked, safe=True)
    draft.restart()
    return statistics.latest


def _statistic(value: ir.Value) -> ir.Value:
    """The running statistic that a value copies, or widens for a node that computes in mixed precision."""
    value = original(value)
    node = value.producer()
    source = original(node.inputs[0]) if is_op(node, "Cast") and node.inputs[0] is not None else None
    return source if source is not None and source.is_graph_input() and source.is_initializer() else value


def _apply_mask(e: Emitter, node: ir.Node, masks: Masks, index: int) -> None:
    """Replace a Dropout: multiply by 1 / (1 - ratio) where the mask keeps, else by 0."""
    x, ratio = Call(node)["data"], dropped_share(node) or 0.0
    keep = masks.keep(x, index, ratio)
    factor = e.where(keep, e.scalar(1 / (1 - ratio) if ratio < 1 else 0.0, x), 0)
    results = (e.typed(e.op("Mul", x, factor), x), keep)
    for old, new in zip(node.outputs, results, strict=False):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, old.name


def _rounded(e: Emitter, wide: ir.Value, like: ir.Value) -> ir.Value:
    """A float32 statistic in the type of another value, at most its largest number."""
    dtype = like.dtype or ir.DataType.FLOAT
    largest = LARGEST.get(dtype.numpy().name)
    if largest is not None:
        wide = e.op("Clip", wide, e.scalar(-largest, wide), e.scalar(largest, wide))
    return e.typed(e.cast(wide, dtype), like)


class _Statistics:
    """Batch statistics with updates of the running ones outside the nodes; `latest`: initializer -> update."""

    def __init__(self, e: Emitter, *, unbiased: bool, together: bool, wide: Mapping[str, ir.Value]) -> None:
        self.e, self.unbiased, self.together, self.wide = e, unbiased, together, wide
        self.latest: dict[str, ir.Value] = {}
        self._corrections: dict[tuple[Any, ...], ir.Value] = {}

    def update(self, node: ir.Node, following: ir.Node | None) -> None:
        """Switch a node to batch statistics and emit the updates before the node `following`.

        With momentum 0 the node's results are the statistics of the batch, which its gradient needs too. ONNX Runtime
        overwrites the operands 3 and 4 of the node unless they are graph outputs, so these are scratch buffers.
        """
        e, n = self.e, Call(node)
        momentum = n.float("momentum", 0.9)
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        e.anchor = node
        stored = [_statistic(n[name]) for name in ("input_mean", "input_var")]
        before = self._before(n, stored)
        count: ir.Value | None = None
        results: Sequence[ir.Value]
        replaced = node.outputs[1:] if self.together else ()
        if self.together:
            *results, count = self._use_moments_over_ranks(node, following, before)
        else:
            use_batch_statistics(node, [self._scratch(v) for v in before])
            results = node.outputs[1:]
        for output, kind in zip(results, ("mean", "var"), strict=True):
            output.name = output.name or e.names.claim(f"{node.outputs[0].name}_{kind}")
        e.anchor = following
        for initializer, value, result in zip(stored, before, results, strict=True):
            fresh = result
            if self.unbiased and result is results[1]:
                factor = self._correction(n["X"], result) if count is None else self._unbiased(count, result)
                fresh = e.mul(result, factor)
            blended = e.typed(e.add(e.mul(value, momentum), e.mul(fresh, 1 - momentum)), value)
            self._show(node, result, replaced[results.index(result)] if replaced else None, blended, initializer)
            if initializer.is_initializer():
                self.latest[initializer.name or ""] = blended
        if self.together:
            node.resize_outputs(1)

    def _before(self, n: Call, stored: Sequence[ir.Value]) -> list[ir.Value]:
        """The statistics that are averaged: masters of narrow ones, or these in float32, in which the node then computes."""
        e = self.e
        if any(v.dtype in _NARROW for v in stored):
            for i, name in enumerate(("scale", "B"), 1):
                n.node.replace_input_with(i, e.cast(n[name], ir.DataType.FLOAT))
        wide = [e.wide(self.wide.get(v.name or "", v)) for v in stored]
        return [self.latest.get(v.name or "", w) for v, w in zip(stored, wide, strict=True)]

    def _show(
        self, node: ir.Node, result: ir.Value, replaced: ir.Value | None, blended: ir.Value, stored: ir.Value
    ) -> None:
        """Let the model's own readers of a statistic read its update, in the type of the stored one."""
        users = [(user, i) for user, i in result.uses() if user not in self.e.emitted and user is not node]
        kept = [v for v in (result, replaced) if v is not None and v.is_graph_output()]
        read = users or kept or (replaced is not None and replaced.uses())
        shown = _rounded(self.e, blended, stored) if read and stored.dtype in _NARROW else blended
        for user, index in users:
            user.replace_input_with(index, shown)
        for value in (result if result.is_graph_output() else None, replaced):
            if value is not None:
                value.replace_all_uses_with(shown, replace_graph_outputs=True)

    def _use_moments_over_ranks(
        self, node: ir.Node, following: ir.Node | None, before: Sequence[ir.Value]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Normalize with the statistics of all ranks, which are operands of the node; return them and their count.

        The node computes in float32 at least, since two large parts of the gradient of its input may cancel.
        """
        e, y, n = self.e, node.outputs[0], Call(node)
        dtype = ir.DataType.DOUBLE if n["X"].dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        moments = ir.Node(DOMAIN, "MomentsOverRanks", [e.cast(n["X"], dtype)], num_outputs=3)
        e.place(moments)
        mean, var, count = moments.outputs
        for value, shape in ((mean, n["input_mean"].shape), (var, n["input_var"].shape), (count, ir.Shape(()))):
            value.type, value.shape = ir.TensorType(dtype), shape
        operands = [e.cast(n[name], dtype) for name in ("X", "scale", "B")]
        for i, operand in enumerate([*operands, mean, var]):
            node.replace_input_with(i, operand)
        node.attributes.pop("training_mode", None)
        e.anchor, kind = following, y.dtype
        if kind not in (dtype, None):
            y.dtype = dtype
            back = ir.Node("", "Cast", [], [ir.AttrInt64("to", int(kind))], num_outputs=1)
            y.replace_all_uses_with(back.outputs[0], replace_graph_outputs=True)
            back.resize_inputs(1)
            back.replace_input_with(0, y)
            e.place(back)
            result = e.typed(back.outputs[0], y)
            result.dtype, result.name, y.name = kind, y.name, e.names.claim(f"{y.name}_wide")
        return e.cast_like(mean, before[0]), e.cast_like(var, before[1]), count

    def _scratch(self, value: ir.Value) -> ir.Value:
        """A buffer of the shape and dtype of `value` that no other node reads."""
        node = ir.Node("", "Mul", [value, self.e.scalar(0, value)], num_outputs=1)
        self.e.place(node)
        return self.e.typed(node.outputs[0], value)

    def _correction(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """n / (n - 1) with n entries per channel, or 1 if n is 1; emitted once for equal shapes."""
        key = None if x.shape is None else (*(d if isinstance(d, int) else d.value for d in x.shape), like.dtype)
        if key is None or None in key:
            return self._ratio(x, like)
        return self._corrections.get(key) or self._corrections.setdefault(key, self._ratio(x, like))

    def _ratio(self, x: ir.Value, like: ir.Value) -> ir.Value:
        e = self.e
        dims = None if x.shape is None else [known(d) for d in x.shape]
        if dims is not None and None not in dims and len(dims) > 1:
            entries = math.prod(d for i, d in enumerate(dims) if i != 1 and d is not None)
            return e.scalar(entries / max(entries - 1, 1), like)
        channels = known(like.shape[0]) if like.shape is not None else None
        count = e.size_div(e.count(x), channels or e.size_max(e.count(like), 1))
        return self._unbiased(e.size_as(count, like), like)

    def _unbiased(self, count: ir.Value, like: ir.Value) -> ir.Value:
        """n / (n - 1), or 1 if the count n is 1."""
        e = self.e
        ratio = e.div(count, e.op("Max", e.sub(count, 1), e.scalar(1, count)))
        return e.cast_like(ratio, like)
