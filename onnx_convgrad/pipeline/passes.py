"""`onnx_ir` passes that differentiate and lower a model, for use in pipelines of other passes."""

from __future__ import annotations

from typing import Unpack

import onnx_ir as ir

from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.pipeline.built import Built, Mode, target_of
from onnx_convgrad.pipeline.complete import STAGES, complete
from onnx_convgrad.pipeline.differentiate import differentiate
from onnx_convgrad.pipeline.options import LoweringSettings, Names, Options, Settings, Wrt
from onnx_convgrad.pipeline.stages import build

__all__ = ["Differentiate", "Lower"]


class Differentiate(GraphPass):
    """Run a whole transformation on a model in place: `augment`, or with another `mode` `vjp`, `grad`, `jvp` or `hvp`.

    Arguments and errors as for `onnx_convgrad.augment`. `lower=False` leaves the abstract gradient operators in the model
    (domain `convgrad`), so that later passes can replace them; `Lower` replaces the rest.

    Args:
        mode: `"augment"`, `"vjp"`, `"grad"`, `"jvp"` or `"hvp"`.
        lower: Whether to replace the abstract gradient operators, too.
        settings: The other keywords of `augment`.
    """

    def __init__(
        self,
        *,
        wrt: Wrt = "parameters",
        of: Names | None = None,
        cotangents: str | None = None,
        per_sample: bool | str = False,
        mode: Mode = "augment",
        lower: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__()
        self.mode, self.stages = mode, (differentiate, *(STAGES if lower else ()))
        self.options = Options(wrt=wrt, of=of, cotangents=cotangents, per_sample=per_sample, **settings)

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

    Arguments and errors as for `onnx_convgrad.augment`.

    Args:
        training: Whether the model is a training step, whose convolutions are lowered, too.
        settings: `target`, `lowering` and the other keywords of `augment` that concern lowerings.
    """

    def __init__(self, *, training: bool = False, **settings: Unpack[LoweringSettings]) -> None:
        super().__init__()
        self.options = Options(training=training, **settings)

    def rewrite(self, model: ir.Model) -> bool:
        """Run the stages after differentiation."""
        complete(Built(model, self.options, target_of(self.options), model.clone()))
        return True
