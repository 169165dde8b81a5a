"""The transformations: a model goes in, a model of the same kind comes out, and the input is never changed.

`save` and `session` write and run results of any size.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.frontend.files import AnyModel, check_destination, model_file, read, write
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.pipeline.batched import Axes, write_vmap
from onnx_convgrad.pipeline.built import Built, Mode
from onnx_convgrad.pipeline.composed import compose
from onnx_convgrad.pipeline.dense import MODES, Pattern, write_hessian, write_jacobian
from onnx_convgrad.pipeline.options import COMPOSITIONS, MemoryLike, Names, Options, TargetLike, Wrt
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.runtime import session as open_session


@transformation
def augment(
    model: AnyModel,
    *,
    wrt: Wrt = "parameters",
    of: Names | None = None,
    cotangents: str | None = None,
    per_sample: bool | str = False,
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Built:
    """Add the gradients of `of` with respect to `wrt` to a model; the original outputs come first.

    It is `vjp(outputs=True)` with defaults for everything.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        wrt: Values to differentiate with respect to: `"parameters"`, `"inputs"`, `"all"`, or names and globs of floating
            values. Or a mapping from any of these to the output channels of stored values, `{"layer3.*": slice(0, 16)}`,
            where `slice(None)` means all. The gradient of a part is the output `<name>[0:16]_grad`.
        of: Values to differentiate; by default every floating output. Names and globs.
        cotangents: `"ones"`: the cotangent of every value in `of` is all ones, and no input is added for it. By default the
            cotangent of `y` is a new graph input `y_grad` of y's shape and dtype, and that of a value with one element is 1.
        per_sample: One gradient per sample for each parameter, along a new first axis. `True` gives each value without a
            batch axis outputs `x_grad` of shape `[N, *shape]`, where N is the first axis of the data inputs. Their sum over
            N is the ordinary gradient. `"squared_norm"` gives the squared Euclidean norm of each of them instead: outputs
            `x_grad_squared_norm` of shape `[N]` (float32, or float64 for float64), computed without the gradients where that
            is predicted to be cheaper. A value in `of` may be a sum or a mean over the samples. Other operators that mix
            samples are refused.
        training: Run BatchNormalization and Dropout in training mode. Updated running statistics become outputs
            `<name>_next`.
        trainable_inputs: Make the differentiated weights graph inputs too. The stored values are their defaults.
        straight_through: Derivatives pass quantizers as if they did not round; without it they are zero. Of QuantizeLinear,
            DynamicQuantizeLinear, QLinearConv and QLinearMatMul they are one inside the range, zero outside. Scales have the
            gradients of Learned Step Size Quantization; those of DynamicQuantizeLinear count as constants. Derivatives stop
            at PyTorch's `detach`, where the file shows it. `False`: derivatives of the numbers of the file: quantizers are
            step functions, with derivative zero, and `detach` does nothing.
        target: The execution provider that runs the result: `"cpu"`, `"cuda"`, `"web"`, `"webgpu"`, `"arm"`, `"portable"`,
            or an `onnx_convgrad.Target`, which also chooses lowerings.
        memory: A share of the memory of a run (`0.5`), a number of bytes, `"min"`, or an `onnx_convgrad.Memory`, which has
            more ways to save it.

    Returns:
        The augmented model (a `ModelProto` for a path). For each member `x` of `wrt` an output `x_grad` of x's shape and
        dtype; the map is in `metadata_props["onnx_convgrad.gradients"]` as JSON.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.
        LoweringError: No lowering applies to a convolution or pool, or the forced one does not.
    """
    return _built("vjp", locals())


@transformation
def vjp(
    model: AnyModel,
    *,
    wrt: Wrt,
    of: Names | None = None,
    outputs: bool = False,
    cotangents: str | None = None,
    per_sample: bool | str = False,
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Built:
    """Return the gradients of `of` with respect to `wrt`: vector-Jacobian products, by reverse mode.

    Nodes that only the original outputs need are left out. Other arguments, result and errors as for `augment`.

    Args:
        outputs: Keep the original outputs, before the gradients.
    """
    return _built("vjp", locals())


@transformation
def grad(
    model: AnyModel,
    *,
    wrt: Wrt,
    of: str,
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Built:
    """Return the gradient of one scalar value, without an input for its cotangent.

    Other arguments, result and errors as for `augment`.

    Args:
        of: The value to differentiate. It must have one element as far as its shape is known.
    """
    return _built("grad", locals())


@transformation
def jvp(
    model: AnyModel,
    *,
    wrt: Wrt,
    of: Names | None = None,
    outputs: bool = False,
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Built:
    """Return the derivative of each member of `of` along a direction of `wrt`: Jacobian-vector products, by forward mode.

    Each member `x` of `wrt` gets a graph input `x_tangent` of its shape and dtype, each `y` of `of` an output `y_tangent`.
    If a member depends on others, its tangent is the sum of its own input and of what follows from the inputs of the others.
    Other arguments, result and errors as for `augment`.

    Args:
        outputs: Keep the original outputs, before the derivatives.
    """
    return _built("jvp", locals())


@transformation
def hvp(
    model: AnyModel,
    *,
    wrt: Wrt,
    of: str,
    composition: str = COMPOSITIONS[0],
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Built:
    """Return the Hessian of one scalar value times a vector.

    Each member `x` of `wrt` gets a graph input `x_tangent` and an output `x_grad_tangent` of its shape and dtype.
    `composition` is `"forward_over_reverse"` (push the gradient forward along the tangents), `"reverse_over_reverse"` (the
    gradient of the product of gradient and tangents) or `"reverse_over_forward"` (the gradient of the derivative along the
    tangents). All are equal up to rounding; the first is usually the cheapest.
    Other arguments, result and errors as for `augment`.

    Args:
        of: The scalar.
        composition: The way to compose the product: one of the three above.
    """
    return _built("hvp", locals())


@transformation
def jacobian(
    model: AnyModel,
    *,
    wrt: Names,
    of: Names | None = None,
    mode: str = "auto",
    per_sample: bool = False,
    sparsity: Any = None,
    target: TargetLike = "cpu",
) -> Built:
    """Return the Jacobians: all derivatives of each number of `of` with respect to each number of `wrt`.

    A loop in the file computes one row after another by reverse mode, or one column after another by forward mode. The
    forward pass, and the slopes that all directions share, are computed once.

    Other arguments and errors as for `augment`.

    Args:
        mode: `"reverse"`, `"forward"`, or `"auto"`: forward if `of` has more numbers than `wrt`, as far as sizes are known.
        per_sample: The Jacobian of each sample, without the zeros between different samples. The first axis of the data
            inputs and of what is in `of` is the batch. Operators that mix samples are refused; parameters need reverse mode.
        sparsity: Where the Jacobian of one `of` by one `wrt` may differ from zero: a matrix with a row for each number of y
            and a column for each of x (of one sample), as an array or a sparse one of SciPy. Columns without a common row,
            or rows without a common column, are then computed together: a band of three takes three directions. Entries
            outside the pattern must be zero, or the result is wrong.

    Returns:
        The model (a `ModelProto` for a path) with one output `<y>_<x>_jacobian` for each `y` of `of` and each `x` of `wrt`,
        in this order, of shape `[*y, *x]` and the dtype of x (of y in forward mode). Per sample it is `[N, *y, *x]`, where y
        and x are the shapes without the batch. With `sparsity` it is `[entries]` or `[N, entries]`, by row, then by column:
        the data of `scipy.sparse.csr_array`.

    Raises:
        ArgumentError: An unknown name or option, a value without samples, or a pattern of another shape.
        DifferentiationError: Some nodes cannot be differentiated or mix samples; all are listed.
    """
    check_names([mode], MODES, "mode")
    per_sample = flag(per_sample, "per_sample")
    pattern = None if sparsity is None else Pattern.of(sparsity)
    write = partial(write_jacobian, of=of, wrt=wrt, mode=mode, per_sample=per_sample, pattern=pattern)
    return compose(model, write, wrt=wrt, target=target)


@transformation
def vmap(model: AnyModel, *, in_axes: Axes = 0, axis_size: int | None = None, target: TargetLike = "cpu") -> Built:
    """Return a model that does for a stack of examples what this one does for one, like `jax.vmap` and `torch.func.vmap`.

    Operators take the new axis along (a convolution in its batch or its groups, a product as a batch of matrices); those
    without such a form run in a Scan over the examples. What no example differs in is computed once. The result can be
    differentiated and stacked again: `vmap(vjp(model, ...), in_axes={"y_grad": 0})` gives a Jacobian.

    Other arguments and errors as for `augment`.

    Args:
        in_axes: Where the inputs have the axis of the examples: one number for all inputs, a list in the order of the
            inputs, or a mapping from names, which may be initializers, too. `None`, and a name that is left out: every
            example reads the same. Negative numbers count from the end of the new shape.
        axis_size: The number of examples; by default a size named `examples` that is known at run time only. Convolutions
            with a weight for each example need it.

    Returns:
        The model (a `ModelProto` for a path) with the same names; inputs with an axis more, and all outputs with the axis of
        the examples first.

    Raises:
        ArgumentError: An unknown name or option, or an axis out of range.
        DifferentiationError: Nodes that no form covers, such as one that gives a sequence; all are listed.
    """
    if axis_size is not None:
        axis_size = whole(axis_size, "axis_size", 1)
    return compose(model, partial(write_vmap, in_axes=in_axes, axis_size=axis_size), target=target)


@transformation
def hessian(model: AnyModel, *, wrt: Names, of: str, per_sample: bool = False, target: TargetLike = "cpu") -> Built:
    """Return the Hessians: all second derivatives of a scalar value by each pair of members of `wrt`.

    A loop in the file pushes one direction after another through the gradient, which is computed once.

    Other arguments and errors as for `augment`.

    Args:
        of: Name of the value: one number or, with `per_sample`, one number per sample.
        per_sample: The Hessian of each sample. The first axis of the data inputs and of `of` is the batch, and `wrt` names
            data inputs; operators that mix samples are refused.

    Returns:
        The model (a `ModelProto` for a path) with one output `<a>_<b>_hessian` for each `a` and `b` of `wrt`, in this order,
        of shape `[*a, *b]`; per sample `[N, *a, *b]`, where a and b are the shapes without the batch.

    Raises:
        ArgumentError: An unknown name or option, a value of more numbers, or a value without samples.
        DifferentiationError: Some nodes cannot be differentiated or mix samples; all are listed.
    """
    per_sample = flag(per_sample, "per_sample")
    return compose(model, partial(write_hessian, of=of, wrt=wrt, per_sample=per_sample), wrt=wrt, target=target)


@typed_errors
def explain(
    model: AnyModel,
    *,
    wrt: Wrt = "parameters",
    of: Names | None = None,
    cotangents: str | None = None,
    per_sample: bool | str = False,
    training: bool = False,
    trainable_inputs: bool = False,
    straight_through: bool = True,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> Report:
    """Report what `augment` would do: the geometry, chosen lowering and rejected lowerings of each gradient.

    Gradients of convolutions and pools are listed; with `training` and `trainable_inputs`, as in a training step, the
    convolutions themselves too. If input sizes are unknown, the report estimates the gain of giving them. Nothing is
    changed or written. Arguments and errors as for `augment`.
    """
    return Report.of(_built("vjp", {**locals(), "compare": True}))


def _built(mode: Mode, arguments: dict[str, Any]) -> Built:
    """Run a transformation with the arguments of its function."""
    model = arguments.pop("model")
    return build(model, Options.given(**arguments), mode=mode)


@typed_errors
def save(model: AnyModel, path: str | os.PathLike[str]) -> None:
    """Write a model with all its weights, which stay as they are in `model`; more than 2 GB go to `<path>.data`.

    An existing file is replaced once everything is written. Weights are copied from wherever they are, so the result
    can be moved (with its `.data`) and run from anywhere.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`.
        path: The file to write.

    Raises:
        ArgumentError: The path is a folder, or the file cannot be written there.
        ModelError: The model cannot be read, or writing failed.
    """
    output = as_path(path, "The file of a model")
    check_destination(output)
    write(read(model), output, alone=True)


@typed_errors
def session(
    model: AnyModel,
    *,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Any:
    """Open an `onnxruntime.InferenceSession` for a model of any size.

    `onnxruntime.InferenceSession(model.SerializeToString())` is the same for models up to 2 GB, beyond which protobuf
    serializes nothing.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`.
        providers: As in `onnxruntime.InferenceSession`, also `"cpu"`, `"cuda"` and `"cuda:1"`; the CPU by default.
        options: Session options by name, as for `onnx_convgrad.Trainer`.

    Raises:
        ArgumentError: An unknown provider or option.
        ModelError: The model cannot be read.
        ExecutionError: The runtime or a library of a provider is missing, or the model is refused.
    """
    found = model_file(model) if isinstance(model, (str, os.PathLike)) else read(model)
    return open_session(found, providers=providers, options=options)
