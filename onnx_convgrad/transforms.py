"""Changes of a model other than derivatives: new heads, adapters, quantizers, other normalizations.

Each takes a model and returns one of the same kind; the input is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.evaluation.calibration import unfold_batchnorm
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.gradient_ops.lower import Lowered, lower_training_operators
from onnx_convgrad.pipeline.options import Options, TargetLike
from onnx_convgrad.programs.device import DeviceProgram, optimize_for_device
from onnx_convgrad.quantization.insert import insert_quantizers
from onnx_convgrad.quantization.quantize import quantize
from onnx_convgrad.surgery.adapters.add import add_adapters, merge_adapters
from onnx_convgrad.surgery.adapters.files import load_adapters
from onnx_convgrad.surgery.batchnorm import replace_batchnorm
from onnx_convgrad.surgery.head import with_new_head
from onnx_convgrad.surgery.over_time import over_time

__all__ = [
    "DeviceProgram",
    "add_adapters",
    "insert_quantizers",
    "load_adapters",
    "lower_gradient_ops",
    "merge_adapters",
    "optimize_for_device",
    "over_time",
    "quantize",
    "replace_batchnorm",
    "replace_head",
    "unfold_batchnorm",
]


@transformation
def replace_head(
    model: AnyModel,
    classes: int,
    *,
    head: str | Sequence[str] | None = None,
    seed: int = 0,
    labels: Sequence[str] | None = None,
) -> ir.Model:
    """Give a classifier a new last layer, or a detector new last layers, for other classes, with fresh weights.

    The layer is the last product with a stored weight before the outputs, such as a Gemm or Conv, also through Softmax,
    Sigmoid, pooling and changes of layout, whose sizes are corrected. Weight and bias are drawn from U(-b, b) with
    b = 1 / sqrt(inputs of one number), with which PyTorch's Linear and Conv start. Everything else stays as it is.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        classes: Number of classes of the new last layer.
        head: The last layer, by the name of its node, weight or result. Needed if the outputs come from several. All
            layers with the scores of the classes, one for each scale, of a detector.
        seed: Seed of the weights.
        labels: Names of the classes, written into the metadata, also in place of those of Ultralytics. Without them, the
            labels of the file are removed if their number changes.

    Raises:
        ArgumentError: The layer is ambiguous, there is none of this name, or labels do not fit.
        ModelError: The model cannot be read, its last layer has no stored weights (or shared or quantized ones), or what
            follows it depends on the number of classes.
    """
    return with_new_head(read(model), classes, head=head, seed=seed, labels=labels)


@transformation
def lower_gradient_ops(model: AnyModel, *, target: TargetLike = "cpu") -> Lowered:
    """Replace the operators Gradient, Adam, Adagrad and Momentum (`ai.onnx.preview.training`) by plain ones.

    ONNX Runtime has no kernels for them; the result runs anywhere. Graph inputs, outputs and weights stay as they are.

    A Gradient gives `dy/dx` for each `x` of its attribute `xs`, of x's shape and dtype, with a cotangent of ones for y. The
    members of `xs` and `zs` are independent variables: no derivative passes through one of them to another, and their
    values are the node's inputs. Inputs that are the named tensors share the forward part; for other inputs the nodes
    between are computed once more. A Gradient of a Gradient's result is a derivative of higher order. An `x` that y does
    not depend on gets zeros and a warning. Dropout and BatchNormalization keep the mode that their nodes have.

    A model with an algorithm in its `training_info` becomes one step of it, with the two graphs combined as the
    specification says: the algorithm's inputs and outputs follow the model's, the updated tensors can be fed, and
    `metadata_props["onnx_convgrad.updates"]` maps each of them to the output with its next value. An initialization is
    left out, with a warning.

    R and T of optimizers must have one element; each tensor keeps its dtype (float32 or float64). Other transformations
    accept models with optimizers, but a Gradient has to be lowered before.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        target: As for `onnx_convgrad.augment`.

    Returns:
        The model (a `ModelProto` for a path) at opset 21. `metadata_props["onnx_convgrad.gradients"]` maps each `x` to the
        graph output with its gradient: the first one, if there are several.

    Raises:
        ArgumentError: An unknown option.
        ModelError: The model cannot be read or brought to opset 21; a Gradient names a tensor that its graph lacks; an
            optimizer lacks an operand or an attribute.
        DifferentiationError: Some nodes between `xs` and `y` cannot be differentiated, or a Gradient stands in the body of
            an If, Loop or Scan; all are listed.
        LoweringError: No lowering applies to a convolution or pool, or the forced one does not.

    The operators are specified in ONNX's `docs/Operators.md`, domain ai.onnx.preview.training, version 1.
    """
    return lower_training_operators(model, Options.given(target=target))
