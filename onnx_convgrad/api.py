"""The transformations: a model goes in, a model of the same kind comes out, and the input is never changed."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import onnx
import onnx_ir as ir

from onnx_convgrad.frontend.canonicalize import InputShapes
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.gradient_ops.lower import lower_training_operators
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.lowering.candidates import Choosing
from onnx_convgrad.pipeline.known_sizes import gain_of_sizes
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.pipeline.stages import Names, build

__all__ = [
    "augment",
    "explain",
    "grad",
    "hvp",
    "jvp",
    "lower_gradient_ops",
    "vjp",
]

M = TypeVar("M", bound=AnyModel)


def augment(
    model: M,
    *,
    wrt: Names = "parameters",
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    per_sample: bool | str = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    deterministic: bool = False,
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    recompute: Names | None = None,
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """Add to a model the gradients of `of` with respect to `wrt`: one graph, outputs first, then gradients.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`. Never changed.
        wrt: `"parameters"`, `"inputs"`, `"all"`, or names or globs of any floating values.
        of: Names of the values to differentiate; by default every floating output.
        seed: `None` takes the cotangent of each target `y` from a new graph input `y_grad` of y's shape and dtype (a
            one-element target is seeded with 1); `"ones"` seeds every target with ones.
        training: Run BatchNormalization and Dropout in training mode; updated running statistics become outputs
            `<name>_next`.
        per_sample: `True` gives parameters (whatever holds no samples) one gradient per sample: outputs `x_grad` of shape
            `[N, *shape]`, N being the first axis of the data inputs, which sum to the ordinary gradient over that axis.
            `"squared_norm"` gives the squared Euclidean norm of each of them instead: outputs `x_grad_squared_norm` of shape
            `[N]` (float32, or float64 for float64), computed without the gradients where that is predicted to be cheaper.
            A target may be a sum or a mean over the samples. What mixes samples otherwise is refused.
        trainable_inputs: Make the `wrt` initializers graph inputs too, with the stored values as defaults.
        target: `"cpu"`, `"cuda"`, `"web"` or `"portable"`.
        deterministic: Build no sum whose order differs from run to run on a GPU: gradients of max-pools are added up window
            by window. Sums at indices that only a run knows stay, and are named in a warning. On the CPU all sums are
            ordered. Sessions have an option of the same name.
        lowering: `"auto"` (the fastest predicted for the target), `"exact"` (the same without those that round more
            than a direct sum, such as Winograd's), or a mapping from gradient operator (or node name) to the name of a
            lowering.
        max_workspace: Bytes that the lowering of one gradient may hold besides its operands and result.
            Larger batches are cut into chunks; what exceeds it even so is not used.
        recompute: Forward values that are not kept for the gradients but computed again for them, from the nearest
            values that are kept: names and globs, or `"auto"`, which frees most memory for at most 15 % more predicted
            time. Random values (Dropout) are always kept. Results are the same bit for bit, unless the runtime fuses
            the nodes of a copied value differently. See `explain` for what it saves and costs.
        input_shapes: Shapes that replace those declared by the graph's inputs.

    Returns:
        The augmented model (a `ModelProto` for a path). For each member `x` of `wrt` an output `x_grad` of x's shape and
        dtype; the map is in `metadata_props["onnx_convgrad.gradients"]` as JSON.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.
        LoweringError: No lowering applies to a convolution or pool, or the forced one does not.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        seed=seed,
        training=training,
        per_sample=per_sample,
        trainable_inputs=trainable_inputs,
        target=target,
        deterministic=deterministic,
        lowering=lowering,
        max_workspace=max_workspace,
        recompute=recompute,
        input_shapes=input_shapes,
    )
    return _like(built.model, model)


def vjp(
    model: M,
    *,
    wrt: Names,
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    per_sample: bool | str = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    deterministic: bool = False,
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    recompute: Names | None = None,
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """The gradients alone: `augment` without the original outputs, and without what only those need.

    Arguments, result and errors as for `augment`.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        seed=seed,
        training=training,
        per_sample=per_sample,
        trainable_inputs=trainable_inputs,
        target=target,
        deterministic=deterministic,
        lowering=lowering,
        max_workspace=max_workspace,
        recompute=recompute,
        input_shapes=input_shapes,
        mode="vjp",
    )
    return _like(built.model, model)


def grad(
    model: M,
    *,
    wrt: Names,
    of: str,
    training: bool = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    deterministic: bool = False,
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    recompute: Names | None = None,
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """The gradient of one scalar value; there is no seed input.

    Arguments, result and errors as for `augment`; `of` must have one element as far as its shape is known.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        training=training,
        trainable_inputs=trainable_inputs,
        target=target,
        deterministic=deterministic,
        lowering=lowering,
        max_workspace=max_workspace,
        recompute=recompute,
        input_shapes=input_shapes,
        mode="grad",
    )
    return _like(built.model, model)


def jvp(
    model: M,
    *,
    wrt: Names,
    of: Names | None = None,
    training: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """Forward mode: the outputs, and the derivative of each member of `of` along given directions of `wrt`.

    Each member `x` of `wrt` gets a graph input `x_tangent` of its shape and dtype, each `y` of `of` an output `y_tangent`.
    Arguments, result and errors as for `augment`.
    """
    built = build(
        model,
        mode="jvp",
        wrt=wrt,
        of=of,
        training=training,
        target=target,
        lowering=lowering,
        max_workspace=max_workspace,
        input_shapes=input_shapes,
    )
    return _like(built.model, model)


def hvp(
    model: M,
    *,
    wrt: Names,
    of: str,
    training: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    input_shapes: InputShapes | None = None,
    composition: str = "forward_over_reverse",
) -> M | onnx.ModelProto:
    """The Hessian of one scalar value times a vector.

    Each member `x` of `wrt` gets a graph input `x_tangent` and an output `x_grad_tangent` of its shape and dtype.
    `composition` says how: `"forward_over_reverse"` (the gradient, pushed forward along the tangents),
    `"reverse_over_reverse"` (the gradient of the product of gradient and tangents) or `"reverse_over_forward"` (the
    gradient of the derivative along the tangents). All are equal but for rounding; the first is the cheapest as a rule.
    Other arguments, result and errors as for `augment`.
    """
    built = build(
        model,
        mode="hvp",
        wrt=wrt,
        of=of,
        training=training,
        target=target,
        lowering=lowering,
        max_workspace=max_workspace,
        input_shapes=input_shapes,
        composition=composition,
    )
    return _like(built.model, model)


def explain(
    model: AnyModel,
    *,
    wrt: Names = "parameters",
    of: Names | None = None,
    target: str = "cpu",
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    recompute: Names | None = None,
    training: bool = False,
    trainable_inputs: bool = False,
    per_sample: bool | str = False,
    input_shapes: InputShapes | None = None,
) -> Report:
    """What `augment` would do: per gradient of a convolution or MaxPool its geometry, the lowering chosen, why not others.

    With `training` and `trainable_inputs`, as a training step has them, the convolutions themselves are in the report too.
    Where sizes of the inputs are not known, it says what giving them would gain. Nothing is changed or written.
    Raises what `augment` raises.
    """
    arguments: dict[str, Any] = {
        "wrt": wrt,
        "of": of,
        "target": target,
        "lowering": lowering,
        "max_workspace": max_workspace,
        "recompute": recompute,
        "training": training,
        "trainable_inputs": trainable_inputs,
        "per_sample": per_sample,
        "input_shapes": input_shapes,
    }
    built = build(model, **arguments, compare=True)
    gain = gain_of_sizes(model, built, arguments)
    return Report(built.choices, built.gradients, target, built.recomputation, gain)


def lower_gradient_ops(
    model: M,
    *,
    target: str = "cpu",
    deterministic: bool = False,
    lowering: Choosing = "auto",
    max_workspace: int | None = None,
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """Write the operators Gradient, Adam, Adagrad and Momentum (`ai.onnx.preview.training`) with plain ones.

    ONNX Runtime has no kernels for them; the result runs anywhere. Graph inputs, outputs and weights stay as they are.

    A Gradient gives `dy/dx` for each `x` of its attribute `xs`, of x's shape and dtype, y being seeded with ones. The
    members of `xs` and `zs` are independent variables: no derivative passes through one of them to another, and their
    values are the node's inputs. Where these are the named tensors, the forward part is shared; where they are others, the
    nodes between are computed once more from those. A Gradient of a Gradient's result is a derivative of higher order. What
    y does not depend on gets zeros, and a warning. Nodes such as Dropout and BatchNormalization are taken as they say.

    A model with an algorithm in its `training_info` becomes one step of it, as the specification combines the two graphs:
    the algorithm's inputs and outputs follow the model's, what it updates can be fed, too, and
    `metadata_props["onnx_convgrad.updates"]` tells which output is the next value of each. An initialization is left
    out, with a warning.

    Optimizers take R and T of one element and keep the dtype of each tensor (float32 or float64). Other transformations
    take models with optimizers as they are, but a Gradient has to be lowered before.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`. Never changed.
        target: As for `augment`, like all that follow: they say how gradients are computed.
        deterministic: See `augment`.
        lowering: See `augment`.
        max_workspace: See `augment`.
        input_shapes: See `augment`.

    Returns:
        The model (a `ModelProto` for a path) at opset 21. `metadata_props["onnx_convgrad.gradients"]` tells for each `x`
        which graph output is its gradient: the first one, if there are several.

    Raises:
        ArgumentError: An unknown option.
        ModelError: The model cannot be read or brought to opset 21; a Gradient names a tensor that its graph lacks; an
            optimizer lacks an operand or an attribute.
        DifferentiationError: Some nodes between `xs` and `y` cannot be differentiated, or a Gradient stands in the body of
            an If, Loop or Scan; all are listed.
        LoweringError: No lowering applies to a convolution or pool, or the forced one does not.

    The operators are specified in ONNX's `docs/Operators.md`, domain ai.onnx.preview.training, version 1.
    """
    done = lower_training_operators(
        model,
        target=target,
        deterministic=deterministic,
        lowering=lowering,
        max_workspace=max_workspace,
        input_shapes=input_shapes,
    )
    return _like(done.model, model)


def _like(result: ir.Model, given: M) -> M | onnx.ModelProto:
    """The result in the kind of the given model; a path gives a proto that stands alone, if it can hold the weights."""
    return cast(M, result) if isinstance(given, ir.Model) else whole_proto(result)
