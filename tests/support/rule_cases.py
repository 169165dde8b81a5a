"""The cases of all families of rules."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from onnx_convgrad.testing import Case

_SWEEPS = frozenset(("test_empty", "test_half_sizes", "test_large_sizes"))
"""Modules that take the cases of others."""


def rule_cases() -> Iterator[Case]:
    """Every case of the modules of `tests.rules`, in order."""
    for path in sorted((Path(__file__).parents[1] / "rules").glob("test_*.py")):
        if path.stem in _SWEEPS:
            continue
        for value in vars(importlib.import_module(f"tests.rules.{path.stem}")).values():
            if isinstance(value, list) and all(isinstance(case, Case) for case in value):
                yield from value
