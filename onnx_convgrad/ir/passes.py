"""The contract of every pass of this package, and a function that runs passes.

Each is an `onnx_ir` pass that changes a model in place and reports whether it did, so other people can run it in their own
`onnx_ir` pipelines. A pass accepts any graph and leaves alone what it does not recognize.
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
        """Rewrite `model` in place; return whether it changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run `rewrite`; `onnx_ir` calls this between `requires` and `ensures`."""
        return ir.passes.PassResult(model, self.rewrite(model))


def run_passes(model: ir.Model, passes: Sequence[ir.passes.PassBase], *, steps: int = 1) -> bool:
    """Run passes in order, up to `steps` times while they change the model; return whether they changed it.

    Raises:
        ConvGradError: The error of a pass, without the errors that `onnx_ir` wraps around it.
    """
    try:
        return ir.passes.PassManager(passes, steps=steps)(model).modified
    except (ir.passes.PassError, ir.passes.InvariantError) as problem:
        raise _cause(problem) from None


def _cause(problem: BaseException) -> BaseException:
    """The original error inside the wrappers of onnx_ir's pass manager."""
    found: BaseException = problem
    while isinstance(found, (ir.passes.PassError, ir.passes.InvariantError)) and found.__cause__ is not None:
        found = found.__cause__
    return found
