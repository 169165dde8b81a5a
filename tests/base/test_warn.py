"""Warnings point at the line of the caller, outside the package."""

from __future__ import annotations

from types import ModuleType

import pytest

from onnx_convgrad.base import warn as module
from onnx_convgrad.base.warn import warn


def test_frames_of_the_package_are_skipped() -> None:
    inner = ModuleType("inner")
    code = compile("def call(warn):\n    warn('deep', DeprecationWarning)\n", f"{module._PACKAGE}/inner.py", "exec")
    exec(code, inner.__dict__)
    with pytest.warns(DeprecationWarning, match="deep") as seen:
        inner.call(warn)
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("filename", "internal"),
    [
        (f"{module._PACKAGE}/api.py", True),
        (f"{module._RULES}/conv.py", True),
        ("/site-packages/onnx_ir/passes/_pass_infra.py", True),
        ("/home/me/train.py", False),
        (f"{module._PACKAGE[:-1]}_plugin/rules.py", False),
    ],
)
def test_internal_files(filename: str, internal: bool) -> None:
    assert module._is_internal(filename) is internal
