"""Layer-wise relevance propagation."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.attribution.explanation import Explanation, explanation
from onnx_convgrad.attribution.walks import lrp_walk
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments


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
        return {"attribution": x.e.mul(x.input, x.walked(lrp_walk(stabilizer, gamma)))}

    return explanation(model, write, ScoreArguments(label, of, input, target))
