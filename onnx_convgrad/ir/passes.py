"""The contract of every pass of this package, and how passes are run.

A pass is an `onnx_ir` pass: it has a name, may state what it `requires` and `ensures`, changes a model in place and tells
whether it did. So it can also be run in a pipeline of `onnx_ir` passes by somebody else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

__all__ = ["GraphPass", "run_passes"]


class GraphPass(ir.passes.InPlacePass):
    """Base class: a subclass rewrites a model in place and returns whether it changed anything."""

    @abstractmethod
    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite `model` in place; whether it changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run `rewrite`; `onnx_ir` calls this between `requires` and `ensures`."""
        return ir.passes.PassResult(model, self.rewrite(model))


def run_passes(model: ir.Model, passes: Sequence[ir.passes.PassBase], *, steps: int = 1) -> bool:
    """Run passes in order, up to `steps` times as long as they change the model; whether they changed it.

    Raises:
        ConvGradError: What a pass raised, without the errors that `onnx_ir` wraps around it.
    """
    try:
        return ir.passes.PassManager(passes, steps=steps)(model).modified
    except (ir.passes.PassError, ir.passes.InvariantError) as problem:
        raise _cause(problem) from None


def _cause(problem: BaseException) -> BaseException:
    """The error inside those that onnx_ir's pass manager has wrapped around it."""
    found: BaseException = problem
    while isinstance(found, (ir.passes.PassError, ir.passes.InvariantError)) and found.__cause__ is not None:
        found = found.__cause__
    return found
