"""Say how a call of one of the functions is computed."""

from __future__ import annotations

from typing import Any

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.functional import aten, forward, gradients, rectified
from onnx_convgrad.functional.calls import explaining
from onnx_convgrad.pipeline.report import Report

__all__ = ["explain"]

_FUNCTIONS = {
    name: getattr(module, name) for module in (aten, forward, gradients, rectified) for name in module.__all__
}


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
    check_names([name], _FUNCTIONS, "function:")
    with explaining() as reports:
        _FUNCTIONS[name](*args, **kwargs)
    return reports[0]
