"""Bring any model into the one form that the rules handle, without changing its results.

Canonical form: no functions, ai.onnx at opset 21, constants as initializers, no initializer among the inputs, every
inferable shape inferred, sizes that are computed from constants folded, and Ifs of known condition replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.frontend.branches import TakeKnownBranches
from onnx_convgrad.frontend.exporters.pytorch import TieCopies
from onnx_convgrad.frontend.opset.functions import InlineFunctions
from onnx_convgrad.frontend.opset.upgrade import ConvertAncient, UpgradeOpset
from onnx_convgrad.frontend.plain_windows import UsePlainWindows
from onnx_convgrad.frontend.sequences import StackSequences, UseSequenceMembers
from onnx_convgrad.frontend.shapes.declared import (
    CleanDimensions,
    DeclaredShapes,
    ForgetShapes,
    InputShapes,
    OverrideShapes,
    RecallShapes,
)
from onnx_convgrad.frontend.shapes.fold_sizes import FoldSizes
from onnx_convgrad.frontend.shapes.infer import InferRanks, InferShapes
from onnx_convgrad.frontend.tidy import (
    GiveConditions,
    MarkConstants,
    NameInnerValues,
    NameNodes,
    RenameRuntimeShapes,
    SortNodes,
)
from onnx_convgrad.frontend.usable import refuse_malformed_nodes, refuse_unusable_graph
from onnx_convgrad.ir.passes import Check, GraphPass, run_passes


def canonicalize(model: ir.Model, input_shapes: InputShapes | None = None, *, fold: bool = True) -> ir.Model:
    """Bring a model that was read and checked to canonical form, in place, and return it; see `canonical_passes`."""
    run_passes(model, canonical_passes(input_shapes, fold=fold))
    return model


def canonical_passes(input_shapes: InputShapes | None = None, *, fold: bool = True) -> list[ir.passes.PassBase]:
    """The passes in their order, from a model that was read and checked to the canonical one.

    With `fold`, integers that follow from constants and static sizes become constants. Without it, the graph stays valid
    for parts of it that are evaluated at other sizes.

    The passes raise:
        ModelError: The model is not a usable ONNX model, or its opset has no equivalent at 21.
        ArgumentError: `input_shapes` names an unknown input or contradicts a rank.
    """
    declared: DeclaredShapes = {}
    well_formed = Check(refuse_malformed_nodes)
    folding = [FoldSizes()] if fold else []
    infer = InferShapes()
    lift = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    # the declared shapes of results belong to the declared inputs, not to those that the caller gives
    recall = [] if input_shapes else [WhenChanged([RecallShapes(declared)], [infer])]
    return [
        ConvertAncient(),
        WhenChanged([InlineFunctions()], [well_formed]),  # with the attributes of the calls
        Check(lambda model: refuse_unusable_graph(model.graph)),
        SortNodes(),
        common.RemoveInitializersFromInputsPass(),
        NameInnerValues(),
        TieCopies(),
        MarkConstants(),
        lift,
        common.LiftSubgraphInitializersToMainGraphPass(),  # so that those of branches and loops are parameters
        NameNodes(),
        GiveConditions(),
        RenameRuntimeShapes(),
        OverrideShapes(input_shapes or {}),
        CleanDimensions(),
        ForgetShapes(declared),
        *folding,
        WhenChanged([TakeKnownBranches(declared)], [NameNodes(), *folding], repeat=True),
        infer,
        WhenChanged([TakeKnownBranches(declared)], [NameNodes(), *folding, infer], repeat=True),
        *recall,
        WhenChanged([UpgradeOpset(), lift, UseSequenceMembers()], [infer, *recall]),
        WhenChanged([StackSequences()], [infer], repeat=True),
        WhenChanged([InferRanks()], [infer], repeat=True),
        *folding,
        *([UsePlainWindows()] if fold else []),
        well_formed,  # with all shapes and constants
    ]


class WhenChanged(GraphPass):
    """Run `then` if `passes` changed the model; with `repeat`, do both again until `passes` change nothing."""

    def __init__(
        self,
        passes: Sequence[ir.passes.PassBase],
        then: Sequence[ir.passes.PassBase],
        *,
        repeat: bool = False,
    ) -> None:
        super().__init__()
        self.passes, self.then, self.repeat = passes, then, repeat

    def rewrite(self, model: ir.Model) -> bool:
        changed = False
        while run_passes(model, self.passes):
            changed = True
            run_passes(model, self.then)
            if not self.repeat:
                break
        return changed
