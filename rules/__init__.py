"""The rules: one module per operator family, each readable on its own; `load` imports them all.

Import this package as `onnx_convgrad.rules`. A rule module imports only `errors`, `base`, `ir` and `autodiff`: it holds
mathematics, and nothing about exporters, execution providers or speed.
"""

from __future__ import annotations

import importlib

if __name__ != "onnx_convgrad.rules":
    raise ImportError(f"import this package as onnx_convgrad.rules, not as {__name__}")

MODULES = (
    "elementwise activations linalg einsum conv pool regions norm norm_batch reduce shape index control recurrent slicing"
    " resize sampling fourier movement quantize ml zeros"
).split()


def load() -> None:
    """Import every rule module; called once by the registry."""
    for name in MODULES:
        importlib.import_module(f"onnx_convgrad.rules.{name}")
