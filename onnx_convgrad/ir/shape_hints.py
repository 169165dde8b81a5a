"""Write the command-line option that gives the shape of a model's input, for hints of errors."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_convgrad.ir.dims import known


def input_shape_option(inputs: Iterable[ir.Value]) -> str:
    """Return an example of `--input-shape` for the first input whose sizes are not all known, or the first input.

    Known sizes are kept; the others are typical ones. For an unknown rank, the example is a batch of images.
    """
    fed = [value for value in inputs if value.name and not value.is_initializer()]
    open_sizes = (v for v in fed if v.shape is None or any(known(d) is None for d in v.shape))
    value = next(open_sizes, fed[0] if fed else None)
    if value is None or value.shape is None:
        return f"--input-shape {'NAME' if value is None else value.name}:1,3,224,224"
    typical = (8, 3, *[64] * len(value.shape)) if len(value.shape) > 2 else (8, 64)
    sizes = [size if (size := known(d)) is not None else usual for d, usual in zip(value.shape, typical, strict=False)]
    return f"--input-shape {value.name}:{','.join(map(str, sizes))}"
