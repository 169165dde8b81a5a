"""What each mode asks for: cotangents and tangents as new graph inputs, derivatives as new outputs, under free names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import jumps_between, rule_of
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.ir.emit import Emitter, known

__all__ = ["COMPOSITIONS", "Derivatives", "Mode", "check_targets"]

Mode = Literal["augment", "vjp", "grad", "jvp", "hvp"]
COMPOSITIONS = ("forward_over_reverse", "reverse_over_reverse", "reverse_over_forward")
"""The ways of writing H v, the first being the default: the derivative of the gradient along v, the gradient of
<gradient, v>, and the gradient of the derivative along v."""


def check_targets(targets: list[ir.Value], mode: Mode) -> None:
    """Raise `ArgumentError` for a target that certainly has more than one element, where the mode takes a scalar."""
    for y in targets if mode in ("grad", "hvp") else []:
        if y.shape is not None and any(known(d) not in (1, None) for d in y.shape):
            raise ArgumentError(
                f"{mode} needs a scalar, but {y.name!r} has shape {y.shape}.",
                hint="Use vjp, or reduce it to one element.",
            )


class Derivatives:
    """Seeds, derivatives, and the new graph inputs and outputs under names that are free."""

    def __init__(self, e: Emitter, sources: list[ir.Value], targets: list[ir.Value]) -> None:
        self.e, self.sources, self.targets = e, sources, targets
        self.seeds: dict[str, str] = {}

    def first(self, mode: Mode, seed: str | None) -> dict[ir.Value, ir.Value]:
        """The value that each derivative belongs to -> its graph output: sources in reverse mode, targets in forward."""
        if mode == "jvp":
            tangents = {x: self._input(x, "tangent") for x in self.sources}
            return self._outputs(self.targets, forward(self.e, tangents, self.targets), "tangent")
        ones = seed == "ones" or mode == "grad"
        cotangents = {y: self._seed(y, ones=ones) for y in self.targets}
        return self._outputs(self.sources, backward(self.e, cotangents, dict.fromkeys(self.sources)), "grad")

    def apart(self, seed: str | None, *, norms: bool) -> dict[ir.Value, ir.Value]:
        """Source -> graph output with the gradient of each sample, or its squared norm."""
        data = data_inputs(self.e.graph, self.sources)
        cotangents = {y: self._seed(y, ones=seed == "ones") for y in self.targets}
        found = backward_per_sample(self.e, cotangents, dict.fromkeys(self.sources), data)
        if norms:
            return self._outputs(self.sources, found.squared_norms(), "grad_squared_norm", found.zero_norms)
        return self._outputs(self.sources, found.gradients, "grad", found.zeros)

    def second(self, composition: str) -> dict[ir.Value, ir.Value]:
        """Source -> graph output with the second derivative of the scalar targets along the tangents of all sources."""
        wanted = dict.fromkeys(self.sources)
        if composition == "reverse_over_forward":
            tangents = {x: self._input(x, "tangent") for x in self.sources}
            slopes = forward(self.e, tangents, self.targets)
            found = backward(self.e, {t: self.e.full_like(t, 1) for t in slopes.values()}, wanted)
            return self._outputs(self.sources, found, "grad_tangent")
        gradients = backward(self.e, {y: self.e.full_like(y, 1) for y in self.targets}, wanted)
        tangents = {x: self._input(x, "tangent") for x in self.sources}
        if composition == "reverse_over_reverse":  # H is symmetric: v may come from the left
            cotangents: dict[ir.Value, ir.Value] = {}
            for x, g in gradients.items():
                cotangents[g] = self.e.add(cotangents[g], tangents[x]) if g in cotangents else tangents[x]
            found = backward(self.e, cotangents, wanted)
        else:
            pushed = forward(self.e, tangents, list(dict.fromkeys(gradients.values())))
            found = {x: pushed[g] for x, g in gradients.items() if g in pushed}
        return self._outputs(self.sources, found, "grad_tangent")

    def claim(self, value: ir.Value, name: str) -> ir.Value:
        """Give `value` the name, or the next free one after it."""
        value.name = self.e.names.claim(name)
        return value

    def _input(self, like: ir.Value, suffix: str) -> ir.Value:
        value = ir.Value(shape=like.shape, type=ir.TensorType(like.dtype or ir.DataType.FLOAT))
        self.e.graph.inputs.append(self.claim(value, f"{like.name}_{suffix}"))
        self.seeds[like.name or ""] = value.name or ""
        return value

    def _seed(self, y: ir.Value, *, ones: bool) -> ir.Value:
        """The cotangent of a target: a graph input, or ones."""
        single = y.shape is not None and all(known(d) == 1 for d in y.shape)
        return self.e.full_like(y, 1) if ones or single else self._input(y, "grad")

    def _outputs(
        self,
        values: list[ir.Value],
        reached: Mapping[ir.Value, ir.Value],
        suffix: str,
        zeros: Callable[[ir.Value], ir.Value] | None = None,
    ) -> dict[ir.Value, ir.Value]:
        """One output per value, named `<name>_<suffix>`; zeros, and a warning, where nothing reaches it."""
        missing = [v for v in values if v not in reached]
        if missing:
            what = "of wrt reaches" if suffix == "tangent" else "of `of` depends on"
            names = first_few([repr(v.name) for v in missing])
            text = f"The derivative is zero: no member {what} {names}{self._steps(missing)}."
            warn(text)
        emitted = set(self.e.emitted)
        taken: set[ir.Value] = set()
        outputs: dict[ir.Value, ir.Value] = {}
        for value in values:
            result = reached[value] if value in reached else (zeros or self.e.zeros_like)(value)
            if result.producer() not in emitted or result in taken:
                result = self._identity(result, result if zeros else value)  # two outputs may hold the same value
            taken.add(result)
            outputs[value] = self.claim(result, f"{value.name}_{suffix}")
        return outputs

    def _steps(self, missing: list[ir.Value]) -> str:
        """Where the way from or to values that get zeros is a step: rounding is what quantized models have."""
        forward = all(v in self.targets for v in missing)
        sources, targets = (self.sources, missing) if forward else (missing, self.targets)
        steps = [n for source in sources for n in jumps_between(source, targets, self.e.order)]
        found = {f"{n.name or n.outputs[0].name!r} ({n.op_type})": rule_of(n) for n in steps}
        if not found:
            return ""
        noted = [f"{name}: {rule.note}" for name, rule in found.items() if rule is not None and rule.note]
        if noted:
            return f" but through what has no derivative here: {first_few(noted)}"
        quantized = any(n.op_type.startswith(("Quantize", "DynamicQuantize")) for n in steps)
        remedy = "; differentiate the model from before its quantization" if quantized else ""
        return f" but through steps, which are flat almost everywhere: {first_few(list(found))}{remedy}"

    def _identity(self, value: ir.Value, like: ir.Value) -> ir.Value:
        node = ir.Node("", "Identity", [value], num_outputs=1)
        self.e.place(node)
        return self.e.typed(node.outputs[0], like)
