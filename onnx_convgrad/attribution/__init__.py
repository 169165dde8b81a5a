"""Saliency maps and other explanations of predictions, as plain ONNX models (tool: may change in a minor version).

For example `onnx_convgrad.attribution.grad_cam("model.onnx")`. Each function takes a classifier and returns it with one
more output, `attribution`.
"""

from __future__ import annotations

from onnx_convgrad.attribution.cam import grad_cam, grad_cam_plus_plus
from onnx_convgrad.attribution.gradients import guided_backprop, input_x_gradient, lrp, saliency
from onnx_convgrad.attribution.paths import integrated_gradients, occlusion, smooth_grad

__all__ = [
    "grad_cam",
    "grad_cam_plus_plus",
    "guided_backprop",
    "input_x_gradient",
    "integrated_gradients",
    "lrp",
    "occlusion",
    "saliency",
    "smooth_grad",
]
