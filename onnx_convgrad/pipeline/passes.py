"""`onnx_ir` passes that differentiate and lower a model, for use in pipelines of other passes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.pipeline.built import Built, Mode, target_of
from onnx_convgrad.pipeline.complete import STAGES, complete
from onnx_convgrad.pipeline.differentiate import differentiate
from onnx_convgrad.pipeline.options import Options, TargetLike
from onnx_convgrad.pipeline.stages import build

__all__ = ["Differentiate", "Lower"]


class Differentiate(GraphPass):
    """Run a whole transformation on a model in place: `vjp`, `grad`, `jvp` or `hvp`.

    Args:
        mode: `"vjp"`, `"grad"`, `"jvp"` or `"hvp"`.
        lower: Whether to replace the abstract gradient operators (domain `convgrad`), too; else they stay, for later
            passes, of which `Lower` is the last.
        keywords: Those of `onnx_convgrad.augment`, with its defaults and errors.
    """

    # Any: the keywords of `augment`
    def __init__(self, *, mode: Mode = "vjp", lower: bool = True, **keywords: Any) -> None:
        super().__init__()
        self.mode, self.stages = mode, (differentiate, *(STAGES if lower else ()))
        self.options = Options.given(**keywords)

    def rewrite(self, model: ir.Model) -> bool:
        """Differentiate a copy of `model` and put its graph in the place of the model's."""
        result = build(model, self.options, mode=self.mode, stages=self.stages).model
        model.graph, model.ir_version, model.producer_name = result.graph, result.ir_version, result.producer_name
        model.functions.clear()
        model.functions.update(result.functions)
        model.metadata_props.clear()
        model.metadata_props.update(result.metadata_props)
        return True


class Lower(GraphPass):
    """Replace the abstract gradient operators that `Differentiate(lower=False)` left in a model by plain ones.

    Args:
        training: Whether the model is a training step, whose convolutions are lowered, too.
        target: As for `onnx_convgrad.augment`.
    """

    def __init__(self, *, training: bool = False, target: TargetLike = "cpu") -> None:
        super().__init__()
        self.options = Options.given(training=training, target=target)

    def rewrite(self, model: ir.Model) -> bool:
        """Run the stages after differentiation."""
        complete(Built(model, self.options, target_of(self.options), model.clone()))
        return True
