"""The table of public functions: each is declared once, by its signature and by the kind of model that computes it.

A declaration returns its arguments by name (`locals()`). Their names say what they are: arrays, or settings. A call looks
up its plan by the shapes of the arrays and the settings (`plans`), which runs a session (`sessions`). For the first such
call the arguments are checked (`checks`, `requests`) and the model is built (`model`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.plans import run, signature_of
from onnx_convgrad.functional.requests import Function, frozen, request
from onnx_convgrad.functional.sessions import Array, explained
from onnx_convgrad.pipeline.report import Report

P = ParamSpec("P")
R = TypeVar("R")

Numbers = int | Sequence[int]
Padding = int | Sequence[int] | str
Mask = Sequence[bool]

_ARRAYS = {
    "input": ("input",),
    "weight": ("weight",),
    "output": ("output",),
    "grad_output": ("grad_output", "gO"),
    "z": ("z",),
    "bias": ("bias",),
    "input_direction": ("ggI", "input_tangent"),
    "weight_direction": ("ggW", "weight_tangent"),
    "bias_direction": ("ggb", "bias_tangent"),
}
"""Operand of a model -> names of the parameters that are its array."""

_PARAMETERS = {
    "grad_output": "Cotangent of the output, `[N, O, *]` or `[O, *]`.",
    "output": "The result of the function whose gradients these are.",
    "ggI": "Cotangent of the input's gradient; `None` for zero.",
    "ggW": "Cotangent of the weight's gradient.",
    "ggb": "Cotangent of the bias's gradient.",
    "gO": "The `grad_output` of the backward pass.",
    "input": "`[N, C, *]`, or `[C, *]` for one sample, with one to three spatial axes.",
    "input_size": "Shape of the input, with or without a batch axis.",
    "weight": "`[O, C / groups, *]`, or `[C, O / groups, *]` if transposed.",
    "weight_size": "Shape of the weight.",
    "z": "What is added, of the shape of the output.",
    "alpha": "The factor of z; `None` for 1.",
    "bias": "`[O]`.",
    "bias_sizes": "`[O]`, which is only checked.",
    "input_tangent": "Direction of the input, of its shape; `None` for zero.",
    "weight_tangent": "Direction of the weight.",
    "bias_tangent": "Direction of the bias, `[O]`.",
    "stride": "Step of the window: a number, or one per spatial axis.",
    "padding": 'Zeros at both ends of each axis: a number, one per axis, `"valid"` (none), or `"same"` for an untransposed '
    "convolution without a stride.",
    "dilation": "Distance of the taps of the kernel: a number, or one per axis.",
    "transposed": "Whether the convolution is a transposed one.",
    "output_padding": "Rows added at the end of the output of a transposed convolution: a number, or one per axis.",
    "groups": "Number of groups that the channels are divided into.",
    "output_mask": "Which results to compute; the others are `None`.",
    "lowering": '`"auto"`, `"exact"`, `"fast"`, the name of a lowering, for the operators that have it, or a mapping from '
    "operators to lowerings; see `augment`. `explain` lists them.",
    "providers": '`"cpu"`, `"cuda"`, or what `onnxruntime.InferenceSession` takes; the CPU by default.',
    "options": 'Options of the session, for example `{"tf32": False}`.',
}
"""Descriptions of the parameters of all functions."""

_EXPLAINED: dict[str, Callable[..., Report]] = {}
"""Name of a function -> its explanation, which takes the same arguments."""


def function(*results: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the public function of a declaration that has the name of the kind of model, for convolutions of any rank."""

    def made(declared: Callable[P, R]) -> Callable[P, R]:
        name: Any = declared.__name__
        return _public(declared, name, name, results)

    return made


def by_rank(
    declared: Callable[P, R], name: str, kind: str, *results: str, **fixed: bool
) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R]]:
    """Make the public functions of a declaration for one, two and three spatial axes; `fixed` are fields of `Function`.

    In the name `{}` stands for the number of axes, in the docstring `{0}` for the operator. Only transposed functions have
    the parameter `output_padding`.
    """
    one, two, three = (_public(declared, name.format(rank), kind, results, rank=rank, **fixed) for rank in (1, 2, 3))
    return one, two, three


def _public(declared: Callable[P, R], name: str, kind: str, results: tuple[str, ...], **fixed: Any) -> Callable[P, R]:
    signature, doc = inspect.signature(declared), inspect.cleandoc(declared.__doc__ or "")
    parameters = signature.parameters
    arrays = {operand: p for operand, names in _ARRAYS.items() for p in names if p in parameters}
    if fixed.get("per_sample"):
        del arrays["bias"]  # it says whether there is one
    row = Function(kind, arrays, tuple(p for p in parameters if p not in arrays.values()), results, **fixed)
    refused = {"output_padding"} if row.rank and not row.transposed else set()
    shown = [p for p in parameters.values() if p.name not in refused]
    if row.rank:
        doc = doc.replace("{0}", f"conv{'_transpose' * row.transposed}{row.rank}d")
    fill = partial(textwrap.fill, width=120, initial_indent=" " * 4, subsequent_indent=" " * 8)
    described = [fill(f"{p.name}: {_PARAMETERS[p.name]}") for p in shown if f"\n    {p.name}: " not in doc]
    doc = "\n".join([doc, *([] if "\nArgs:\n" in doc else ["", "Args:"]), *described])

    def typed(compute: Callable[[Function, Mapping[str, Any]], Any]) -> Callable[P, Any]:
        @wraps(declared)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if not refused.isdisjoint(kwargs):
                raise ArgumentError(f"{name}() got an unexpected keyword argument 'output_padding'.")
            return compute(row, declared(*args, **kwargs))  # type: ignore[arg-type]

        call.__name__ = call.__qualname__ = name
        call.__doc__, call.__signature__ = doc, signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return typed_errors(call)

    _EXPLAINED[name] = typed(_explained)
    return typed(_computed)


def _computed(row: Function, values: Mapping[str, Any]) -> Any:
    results = run(row, _arrays(row, values), _settings(row, values))
    return results if len(results) > 1 else results[0]


def _explained(row: Function, values: Mapping[str, Any]) -> Report:
    return explained(request(row, signature_of(_arrays(row, values)), _settings(row, values)))


def _arrays(row: Function, values: Mapping[str, Any]) -> list[Array | None]:
    given = [values[name] for name in row.arrays.values()]
    return [a if a is None or (type(a) is np.ndarray and a.dtype.isnative) else _array(a) for a in given]


def _settings(row: Function, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The settings of a call, frozen."""
    settings = []
    for name in row.settings:
        value = values[name]
        try:
            key = frozen(value)
            hash(key)
        except ArgumentError:
            raise
        except Exception as problem:
            raise ArgumentError(f"{name}, of type {type(value).__name__}, cannot be read: {problem}.") from problem
        settings.append(key)
    return tuple(settings)


def _array(values: Any) -> Array:
    try:
        array = np.asarray(values)
    except Exception as problem:
        raise ArgumentError(
            f"An operand of type {type(values).__name__} cannot become an array: {problem}."
        ) from problem
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@typed_errors
def explain(name: str, *args: Any, **kwargs: Any) -> Report:  # Any: what the function takes
    """Report which lowering a call takes, what each lowering is predicted to cost, and why others do not apply.

    Nothing is computed: only the shapes, dtypes and memory formats of the arrays matter, so `np.broadcast_to(0.0, shape)`
    will do. A forward convolution for which ONNX Runtime has a kernel has no lowerings, and an empty report.

    Args:
        name: A function of `onnx_convgrad.functional`, such as `"conv2d_weight"`.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        A report as from `onnx_convgrad.explain`: `rows` for programs, `str()` for people. A call that is split over the
        batch is reported as a whole.

    Raises:
        ArgumentError: There is no such function, or it refuses the arguments.
        LoweringError: The lowering that `lowering=` chose does not apply.

    >>> import numpy as np
    >>> x, g = np.ones((1, 8, 9, 9), np.float32), np.ones((1, 8, 7, 7), np.float32)
    >>> report = explain("conv2d_weight", x, (8, 8, 3, 3), g, lowering="im2col_gemm")
    >>> [(row["operator"], row["chosen"]) for row in report.rows]
    [('ConvWeightGrad', 'im2col_gemm')]
    """
    check_names([name], _EXPLAINED, "function:")
    return _EXPLAINED[name](*args, **kwargs)
