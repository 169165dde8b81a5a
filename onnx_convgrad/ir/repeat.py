"""Repeat every element along some axes, as an enlargement by whole factors does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter

_RESIZED = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def repeat_elements(e: Emitter, v: ir.Value, times: Sequence[int]) -> ir.Value:
    """Repeat each element of `v` `times[axis]` times along every axis: [m] -> [m k].

    Along the last two axes by Resize, which is many times faster there than Expand but has few dtypes; along others by
    copies side by side.
    """
    dims, rank = e.dims(v), len(times)
    last = max(rank - 2, 0)
    if v.dtype not in _RESIZED or all(k == 1 for k in times[last:]):
        last = rank
    else:
        lead = [e.size_mul(1, *dims[: last - 1]), dims[last - 1]] if last else [1, 1]
        scales = e.const(np.asarray([1, 1, *times[last:]], np.float32))
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        v = e.op("Resize", e.reshape(v, [*lead, *dims[last:]]), None, scales, **how)
        dims[last:] = [e.size_mul(size, k) for size, k in zip(dims[last:], times[last:], strict=True)]
    for axis in reversed(range(last)):
        if times[axis] > 1:
            rows = e.reshape(v, [e.size_mul(1, *dims[: axis + 1]), 1, e.size_mul(1, *dims[axis + 1 :])])
            v = e.concat([rows] * times[axis], 1)
            dims[axis] = e.size_mul(dims[axis], times[axis])
    return e.reshape(v, dims)
