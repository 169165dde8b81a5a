"""Differentiate a canonical model: cotangents and tangents become graph inputs, derivatives graph outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import jumps_between, rule_of
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.backends.cpu.batch_statistics import ShareBatchStatistics
from onnx_convgrad.base.progress import announce
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.exporters.pytorch import forget_detached
from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.frontend.parts import chosen_parts, split_parts
from onnx_convgrad.frontend.quantized import mark_quantized
from onnx_convgrad.frontend.roles import NoteRoles
from onnx_convgrad.frontend.selection import resolve_of, resolve_wrt, warn_of_quantized
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.notes import DERIVATIVE_INPUTS, GRADIENTS, is_detach
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.pipeline.built import Built, Mode
from onnx_convgrad.pipeline.modes import set_training, training_passes
from onnx_convgrad.pipeline.options import Names, Wrt


def differentiate(built: Built) -> None:
    """Add the derivatives as abstract operators."""
    announce("differentiating")
    m, graph, options = built.model, built.model.graph, built.options
    sources, targets = resolve_wrt(graph, _names(m, options.wrt)), resolve_of(graph, options.of)
    _check_targets(targets, built.mode)
    statistics = _prepare(built, sources, targets)
    if options.straight_through:
        marks = mark_quantized(graph, sources)
        sources, targets = ([marks.get(v, v) for v in values] for values in (sources, targets))
    else:
        warn_of_quantized(graph)
        forget_detached(graph)
    built.forward = list(graph)
    derivatives = _Derivatives(built, sources, targets)
    results = derivatives.emit()
    if built.keeps_outputs:
        graph.outputs.extend(derivatives.claim(v, f"{name}_next") for name, v in statistics if not v.is_graph_output())
    else:
        graph.outputs.clear()
    graph.outputs.extend(results.values())
    if options.trainable_inputs:
        graph.inputs.extend(v for v in sources if v.is_initializer() and not v.is_graph_input())
    built.gradients = {value.name or "": result.name or "" for value, result in results.items()}
    m.metadata_props.update({DERIVATIVE_INPUTS: json.dumps(derivatives.inputs), GRADIENTS: json.dumps(built.gradients)})


def _names(m: ir.Model, wrt: Wrt) -> Names:
    """The names of what is differentiated; chosen channels become values of their own, in place."""
    if not isinstance(wrt, Mapping):
        return wrt
    names, parts = chosen_parts(m.graph, wrt)
    split_parts(m.graph, parts)
    NoteRoles()(m)
    return names


def _prepare(built: Built, sources: list[ir.Value], targets: list[ir.Value]) -> list[tuple[str, ir.Value]]:
    """Set training mode, share statistics, and keep the primal model; return the updated running statistics."""
    m, graph, options = built.model, built.model.graph, built.options
    statistics = set_training(graph) if options.training else []
    mark_varying(graph, sources)
    sharing = ShareBatchStatistics({*sources, *targets, *(() if options.training else graph.outputs)})
    if not options.per_sample:  # per sample, batch statistics are refused
        run_passes(m, [sharing])
    built.primal = cloned(m)
    if options.training and options.target.lowering != "exact":
        run_passes(m, training_passes(built.target, {*sources, *targets}))
    return [(name, sharing.moved.get(value, value)) for name, value in statistics]


def _check_targets(targets: list[ir.Value], mode: Mode | None) -> None:
    """Raise `ArgumentError` for a value of `of` known to have more than one element, if the mode takes a scalar."""
    for y in targets if mode in ("grad", "hvp") else []:
        if y.shape is not None and any(known(d) not in (1, None) for d in y.shape):
            raise ArgumentError(
                f"{mode} needs a scalar, but {y.name!r} has shape {y.shape}.",
                hint="Use vjp, reduce it to one element, or take the loss of a training program:"
                f" {mode}(program.evaluate, of='loss', ...).",
            )


class _Derivatives:
    """Emits derivatives with their cotangents and tangents, and names the new graph inputs and outputs.

    `inputs` maps each value to the graph input with its cotangent or tangent.
    """

    def __init__(self, built: Built, sources: list[ir.Value], targets: list[ir.Value]) -> None:
        self.e, self.sources, self.targets = built.emitter(), sources, targets
        self.mode, self.options = built.mode, built.options
        self.inputs: dict[str, str] = {}

    def emit(self) -> dict[ir.Value, ir.Value]:
        """Return the graph output with the derivative of each source, or in forward mode of each value in `of`."""
        mode, options = self.mode, self.options
        if mode == "jvp":
            return self._outputs(
                self.targets, forward(self.e, self._tangents(), self.targets, directions=True), "tangent"
            )
        if mode == "hvp":
            return self._outputs(self.sources, self._second_order(options.composition), "grad_tangent")
        # before the inputs of cotangents are added, which do not count
        data = data_inputs(self.e.graph, self.sources) if options.per_sample else []
        ones = options.cotangents == "ones" or mode == "grad"
        cotangents = {y: self._cotangent(y, ones=ones) for y in self.targets}
        if not options.per_sample:
            return self._outputs(self.sources, backward(self.e, cotangents, dict.fromkeys(self.sources)), "grad")
        result = backward_per_sample(self.e, cotangents, dict.fromkeys(self.sources), data)
        if options.per_sample == "squared_norm":
            return self._outputs(self.sources, result.squared_norms(), "grad_squared_norm", result.zero_norms)
        return self._outputs(self.sources, result.gradients, "grad", result.batch.zeros)

    def _second_order(self, composition: str) -> Mapping[ir.Value, ir.Value]:
        """The second derivative of the scalars along the tangents of all sources, by source."""
        wanted = dict.fromkeys(self.sources)
        if composition == "reverse_over_forward":
            slopes = forward(self.e, self._tangents(), self.targets, directions=True)
            return backward(self.e, {t: self.e.full_like(t, 1) for t in slopes.values()}, wanted)
        gradients = backward(self.e, {y: self.e.full_like(y, 1) for y in self.targets}, wanted)
        tangents = self._tangents()
        if composition == "reverse_over_reverse":  # H is symmetric, so v may multiply from the left
            cotangents: dict[ir.Value, ir.Value] = {}
            for x, g in gradients.items():
                cotangents[g] = self.e.add(cotangents[g], tangents[x]) if g in cotangents else tangents[x]
            return backward(self.e, cotangents, wanted)
        pushed = forward(self.e, tangents, list(dict.fromkeys(gradients.values())), directions=True)
        return {x: pushed[g] for x, g in gradients.items() if g in pushed}

    def claim(self, value: ir.Value, name: str) -> ir.Value:
        """Name `value`; a number is appended if the name is taken."""
        value.name = self.e.names.claim(name)
        return value

    def _input(self, like: ir.Value, suffix: str) -> ir.Value:
        value = ir.Value(shape=like.shape, type=ir.TensorType(like.dtype or ir.DataType.FLOAT))
        self.e.graph.inputs.append(self.claim(value, f"{like.name}_{suffix}"))
        self.inputs[like.name or ""] = value.name or ""
        return value

    def _tangents(self) -> dict[ir.Value, ir.Value]:
        return {x: self._input(x, "tangent") for x in self.sources}

    def _cotangent(self, y: ir.Value, *, ones: bool) -> ir.Value:
        """Return the cotangent of a value: ones, or a new graph input."""
        single = y.shape is not None and all(known(d) == 1 for d in y.shape)
        return self.e.full_like(y, 1) if ones or single else self._input(y, "grad")

    def _outputs(
        self,
        values: list[ir.Value],
        reached: Mapping[ir.Value, ir.Value],
        suffix: str,
        zeros: Callable[[ir.Value], ir.Value] | None = None,
    ) -> dict[ir.Value, ir.Value]:
        """Name one output per value `<name>_<suffix>`; a value without a derivative gets zeros and a warning."""
        missing = [v for v in values if v not in reached]
        if missing:
            relation = "of wrt reaches" if suffix == "tangent" else "of `of` depends on"
            names = first_few([repr(v.name) for v in missing])
            warn(f"The derivative is zero: no member {relation} {names}{self._steps(missing)}.")
        emitted = set(self.e.emitted)
        taken: set[ir.Value] = set()
        outputs: dict[ir.Value, ir.Value] = {}
        for value in values:
            result = reached[value] if value in reached else (zeros or self.e.zeros_like)(value)
            if result.producer() not in emitted or result in taken:
                like = result if zeros else value
                result = self.e.typed(self.e.copied(result), like)  # two outputs may hold the same value
            taken.add(result)
            outputs[value] = self.claim(result, f"{value.name}_{suffix}")
        return outputs

    def _steps(self, missing: list[ir.Value]) -> str:
        """Explain zeros by the step functions on the way, such as the rounding of quantized models."""
        in_forward_mode = all(v in self.targets for v in missing)
        sources, targets = (self.sources, missing) if in_forward_mode else (missing, self.targets)
        steps = [n for source in sources for n in jumps_between(source, targets, self.e.order)]
        rules = {f"{n.name or n.outputs[0].name!r} ({n.op_type})": rule_of(n) for n in steps}
        if not rules:
            return ""
        detached = [repr(n.name or n.outputs[0].name) for n in steps if is_detach(n)]
        if detached:
            return f" but through values that PyTorch detaches: {first_few(detached)}"
        noted = [f"{name}: {rule.note}" for name, rule in rules.items() if rule is not None and rule.note]
        if noted:
            return f" but through nodes without a derivative here: {first_few(noted)}"
        quantized = any(n.op_type.startswith(("Quantize", "DynamicQuantize")) for n in steps)
        passing = "differentiate the model from before its quantization"
        remedy = f"; {passing if self.options.straight_through else 'use straight_through=True'}" if quantized else ""
        return f" but through steps, which are flat almost everywhere: {first_few(list(rules))}{remedy}"
