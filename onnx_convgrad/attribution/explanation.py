"""The parts that all explanations share: the explained input, the scores, gradients at the input and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity
from onnx_convgrad.autodiff.reverse import Walk, backward
from onnx_convgrad.base.warn import warn
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import at_point
from onnx_convgrad.pipeline.scores import ScoreArguments, Scores, with_scores


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
        """The result of another walk in place of the gradient: it changes how cotangents pass certain nodes."""
        source = self.input if wrt is None else wrt
        cotangents = {self.scores.values: self.scores.mask}
        walker = walk(self.e, Activity.between([source], cotangents, self.e.order))
        return self._or_zeros(walker.run(cotangents, [source]), source)

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
    model: AnyModel, write: Callable[[Explanation], Mapping[str, ir.Value]], arguments: ScoreArguments
) -> Built:
    """Add the outputs that `write` returns, and `explained_label`, to a model; arguments and errors as for `saliency`."""

    def added(e: Emitter, image: ir.Value, scores: Scores) -> Mapping[str, ir.Value]:
        return {**write(Explanation(e, image, scores)), "explained_label": scores.label}

    return with_scores(model, added, arguments)
