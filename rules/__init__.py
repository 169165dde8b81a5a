"""The rule table, one module per operator family. Each is readable on its own; `load` imports them all.

Imported as `onnx_convgrad.rules`. A rule module imports nothing of the engine but `registry`,
`emit`, `geometry`, `errors` and what is in `graph`; those with lowerings also `lowering`.
"""

from __future__ import annotations

import importlib

if __name__ != "onnx_convgrad.rules":
    raise ImportError(f"import this package as onnx_convgrad.rules, not as {__name__}")

MODULES = (
    "elementwise",
    "activations",
    "linalg",
    "einsum",
    "conv",
    "conv_spec",
    "conv_batch",
    "conv_shared",
    "conv_kernels",
    "conv_input_grad",
    "conv_input_gemm",
    "conv_stacked",
    "conv_boxes",
    "conv_phases",
    "conv_tiled",
    "conv_row_phases",
    "conv_weight_grad",
    "conv_weight_shift",
    "conv_depthwise",
    "conv_bands",
    "conv_interleaved",
    "conv_sliding",
    "conv_per_sample",
    "winograd_axes",
    "conv_winograd",
    "conv_winograd_rows",
    "conv_forward",
    "pool",
    "pool_max",
    "pool_max_grad",
    "pool_global",
    "norm",
    "norm_plain",
    "norm_folded",
    "dropout",
    "softmax",
    "reduce",
    "shape",
    "index",
    "sequence",
    "control",
    "recurrent",
    "slicing",
    "resize",
    "resize_products",
    "grid_sample",
    "deform_conv",
    "fourier",
    "movement",
    "per_sample",
    "zeros",
)


def load() -> None:
    """Import every rule module; called once by the registry."""
    for name in MODULES:
        importlib.import_module(f"onnx_convgrad.rules.{name}")
