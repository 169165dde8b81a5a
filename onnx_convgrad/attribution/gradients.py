"""Explanations by one reverse walk: saliency, input x gradient, guided backpropagation, layer-wise relevance."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.attribution.explanation import Explanation, explanation
from onnx_convgrad.attribution.walks import GuidedWalk, lrp_walk, rectifies
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.base.warn import warn
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments


@transformation
def saliency(
    model: AnyModel,
    *,
    label: Label = None,
    absolute: bool = True,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by the gradient of its score with respect to the input.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        label: The class to explain: its number, `"input"` for a graph input `label` (int64 `[N]`), or `None` for the class
            with the highest score, sample by sample. A tuple is a class and its place on the further axes, as in
            `label=(3, 120)` for the cell 120 of a detector's scores `[N, C, cells]`.
        of: The value with the scores `[N, C]`; further axes are summed unless `label` has a place. By default the only
            floating output, or the logits before its Softmax or Sigmoid.
        input: The input that is explained; by default the only floating one.
        absolute: Give the absolute value of the gradient, as the paper does.
        target: As for `onnx_convgrad.augment`.

    Returns:
        The model with two more outputs: `attribution`, of the input's shape and dtype, and `explained_label`, int64 `[N]`.

    Raises:
        ArgumentError: An unknown name or option, or an ambiguous input or output.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.

    Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks (2014), section 3.
    """

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        gradient = x.gradient(x.input)
        return {"attribution": x.e.op("Abs", gradient) if absolute else gradient}

    return explanation(model, write, ScoreArguments(label, of, input, target))


@transformation
def input_x_gradient(
    model: AnyModel,
    *,
    label: Label = None,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by the product of input and gradient, a first-order estimate of each number's contribution.

    Arguments, result and errors as for `saliency`.

    Shrikumar et al.: Not Just a Black Box (2016), arXiv:1605.01713.
    """

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        return {"attribution": x.e.mul(x.input, x.gradient(x.input))}

    return explanation(model, write, ScoreArguments(label, of, input, target))


@transformation
def guided_backprop(
    model: AnyModel,
    *,
    label: Label = None,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by a gradient that only positive signals reach.

    At every Relu (or Clip from 0), negative cotangents become zero before they pass. It shows which edges excite the
    score; see "Sanity Checks for Saliency Maps" (arXiv:1810.03292) for why the result depends little on the class.

    Arguments, result and errors as for `saliency`; a model without a Relu gives the plain gradient and a warning.

    Springenberg et al.: Striving for Simplicity (2015), arXiv:1412.6806, section 3.4.
    """

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        if not any(map(rectifies, x.e.graph)):
            warn("The model has no Relu: guided backpropagation is its plain gradient.")
        return {"attribution": x.gradient(x.input, GuidedWalk)}

    return explanation(model, write, ScoreArguments(label, of, input, target))


@transformation
def lrp(
    model: AnyModel,
    *,
    label: Label = None,
    stabilizer: float = 1e-6,
    gamma: float = 0.0,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by its score, distributed over the input layer by layer in proportion to the contributions.

    Convolutions and matrix products take the rule of `stabilizer` and `gamma`. Pools, sums and normalizations in
    inference mode distribute in proportion, activations pass relevance on, and the factors of a product of two values
    share it equally. Without biases, and for a small `stabilizer`, the relevance of a sample adds up to its score.

    Other arguments, result and errors as for `saliency`.

    Args:
        stabilizer: Added to the results of layers, away from zero; larger numbers absorb weak and contradictory relevance.
        gamma: Share by which positive weights count more; 0 is the epsilon rule of the papers, 0.25 a usual choice.

    Bach et al. (2015), doi:10.1371/journal.pone.0130140; gamma: Montavon et al.: Layer-Wise Relevance Propagation: An
    Overview (2019). Products: Achtibat et al.: AttnLRP (2024), arXiv:2402.05602.
    """
    positive(stabilizer, "stabilizer", zero=False)
    positive(gamma, "gamma")

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        return {"attribution": x.e.mul(x.input, x.gradient(x.input, lrp_walk(stabilizer, gamma)))}

    return explanation(model, write, ScoreArguments(label, of, input, target))
