"""What all explanations share: the explained input, the scores, gradients at the input and at other points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity
from onnx_convgrad.autodiff.reverse import Walk, backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.explainers.scores import Label, Scores, scores_of
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import at_point, compose, one_floating_input
from onnx_convgrad.pipeline.options import LoweringSettings, Options


@dataclass(frozen=True, slots=True)
class Explanation:
    """The graph that an explanation is written into.

    Attributes:
        e: Its emitter.
        input: The explained input, `[N, ...]`.
        scores: The scores and the explained class of each sample.
    """

    e: Emitter
    input: ir.Value
    scores: Scores

    def gradient(self, wrt: ir.Value | None = None) -> ir.Value:
        """The gradient of each sample's score with respect to the input, or to another value of the graph."""
        source = self.input if wrt is None else wrt
        return self._or_zeros(backward(self.e, {self.scores.values: self.scores.mask}, [source]), source)

    def walked(self, walk: type[Walk], wrt: ir.Value | None = None) -> ir.Value:
        """The same by another walk, which changes how cotangents pass certain nodes."""
        source = self.input if wrt is None else wrt
        seeds = {self.scores.values: self.scores.mask}
        walker = walk(self.e, Activity.between([source], seeds, self.e.order), tuple(seeds))
        found = walker.run(seeds, [source])
        if walker.problems:
            raise DifferentiationError(walker.problems)
        return self._or_zeros(found, source)

    def score_at(self, point: ir.Value) -> ir.Value:
        """The score `[N]` of the same class at another input."""
        return self.scores.selected(self.e, *at_point(self.e, {self.input: point}, [self.scores.values]))

    def gradient_at(self, point: ir.Value) -> ir.Value:
        """The gradient of the same score at another input, with respect to that."""
        (values,) = at_point(self.e, {self.input: point}, [self.scores.values])
        return self._or_zeros(backward(self.e, {values: self.scores.mask}, [point]), point)

    def _or_zeros(self, found: Mapping[ir.Value, ir.Value], source: ir.Value) -> ir.Value:
        if source not in found:
            warn(f"The attribution is zero: the scores do not depend on {source.name!r}.")
            return self.e.zeros_like(source)
        return found[source]


def explanation(
    model: AnyModel,
    write: Callable[[Explanation], Mapping[str, ir.Value]],
    *,
    label: Label,
    of: str | None,
    input: str | None,  # noqa: A002 - the term of ONNX
    settings: LoweringSettings,
) -> Built:
    """Add the outputs that `write` returns, and `explained_label`, to a model; arguments and errors as for `saliency`."""

    def added(e: Emitter) -> Mapping[str, ir.Value]:
        x = Explanation(e, one_floating_input(e.graph, input), scores_of(e, of, label))
        return {**write(x), "explained_label": x.scores.label}

    return compose(model, Options(wrt="inputs", **settings), added)
