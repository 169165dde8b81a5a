"""Check the gradients of a model numerically, with the options of the command `check`."""

from __future__ import annotations

from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.checking.report import CheckReport
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.pipeline.options import MemoryLike, Names, Options, TargetLike
from onnx_convgrad.pipeline.stages import build


def check(
    model: AnyModel,
    *,
    wrt: Names = "all",
    of: Names | None = None,
    seed: int = 0,
    samples: int = 1,
    training: bool = False,
    target: TargetLike = "cpu",
    memory: MemoryLike = None,
) -> CheckReport:
    """Build the gradients of `model`, and compare them with numeric ones and PyTorch's."""
    settings = {"wrt": wrt, "of": of, "training": training, "straight_through": False, "outputs": False}
    built = build(model, Options.given(**settings, target=target, memory=memory))
    return verify_numerically(built, model, seed=seed, samples=samples)
