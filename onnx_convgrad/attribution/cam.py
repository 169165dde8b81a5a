"""Class activation maps: Grad-CAM and Grad-CAM++."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.attribution.explanation import Explanation, explanation
from onnx_convgrad.attribution.layers import find_layer, spatial_axes
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments

Weights = Callable[[Emitter, ir.Value, ir.Value, list[int]], ir.Value]
"""Emits the weight of each channel, `[N, C, 1, ...]`, given the emitter, a layer, its gradient and the spatial axes."""


@transformation
def grad_cam(
    model: AnyModel,
    *,
    label: Label = None,
    layer: str | None = None,
    relu: bool = True,
    resize: bool = True,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction by the places where the channels of a layer speak for the class.

    The map is the sum of the layer's channels, each with the mean gradient of the score over its places as weight.

    Other arguments and errors as for `saliency`.

    Args:
        layer: Name of a layer's result with spatial axes. It is a value `[N, C, ...]`. By default the result of the last
            convolution that has them, with the activations, normalizations and sums behind it.
        relu: Replace negative numbers of the map by zeros, as the paper does.
        resize: Give the map the spatial size of the input, by linear interpolation.

    Returns:
        The model with two more outputs: `attribution`, `[N, H, W]` without an axis of channels, of the layer's dtype, and
        `explained_label`, int64 `[N]`.

    Raises:
        ArgumentError: An unknown name or option, an ambiguous input or output, or no convolution without `layer`.

    Selvaraju et al.: Grad-CAM (2017), arXiv:1610.02391, equations 1 and 2.
    """

    def mean(e: Emitter, _: ir.Value, gradient: ir.Value, axes: list[int]) -> ir.Value:
        return e.reduce("ReduceMean", gradient, axes)

    return explanation(model, _map(mean, layer, relu=relu, resize=resize), ScoreArguments(label, of, input, target))


@transformation
def grad_cam_plus_plus(
    model: AnyModel,
    *,
    label: Label = None,
    layer: str | None = None,
    relu: bool = True,
    resize: bool = True,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Explain a prediction as `grad_cam` does, with weights that find several objects of one class.

    With g the gradient of the score and A the layer, the weight of a channel is the sum over its places of
    alpha max(g, 0), where alpha = g^2 / (2 g^2 + g^3 sum A), and 0 where g is 0. (The factor exp(score) of the paper, equal
    for all channels, is left out.)

    Arguments, result and errors as for `grad_cam`.

    Chattopadhay et al.: Grad-CAM++ (2018), arXiv:1710.11063, equations 16 and 19.
    """

    def weights(e: Emitter, values: ir.Value, g: ir.Value, axes: list[int]) -> ir.Value:
        # g^2 divided by itself: alpha = 1 / (2 + g sum A)
        below = e.add(e.mul(g, e.reduce_sum(values, axes)), 2)
        flat = e.compare("Equal", below, 0)
        alpha = e.where(flat, 0, e.div(e.scalar(1, g), e.where(flat, e.scalar(1, g), below)))
        return e.reduce_sum(e.mul(alpha, e.op("Relu", g)), axes)

    return explanation(model, _map(weights, layer, relu=relu, resize=resize), ScoreArguments(label, of, input, target))


def _map(
    weights: Weights, layer: str | None, *, relu: bool, resize: bool
) -> Callable[[Explanation], Mapping[str, ir.Value]]:
    """The function that writes a map of the layer's channels with these weights."""

    def write(x: Explanation) -> Mapping[str, ir.Value]:
        e = x.e
        values = find_layer(e, x.input, x.scores.values, layer)
        axes = list(range(2, e.rank(values, "a class activation map")))
        weighted = e.mul(values, weights(e, values, x.gradient(values), axes))
        cam = e.reduce_sum(weighted, [1])
        if relu:
            cam = e.op("Relu", cam)
        places = spatial_axes(e, x.input)
        if resize and len(places) == len(axes):
            sizes = e.vector([e.dim(x.input, 0), 1, *(e.dim(x.input, axis) for axis in places)])
            cam = e.op("Resize", cam, None, None, sizes, mode="linear", coordinate_transformation_mode="half_pixel")
        return {"attribution": e.squeeze(cam, [1])}

    return write
