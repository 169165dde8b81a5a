"""Dropout: the node's own mask, which it is made to give if it does not.

    y = x mask / (1 - ratio) in training, y = x otherwise

ONNX Runtime's mask is all true outside training, so that one formula serves a mode that is only known at run time.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Cotangents, elementwise
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter


@elementwise("Dropout", wrt=("data",))
def dropout(e: Emitter, n: Call) -> Cotangents:
    """dy/dx = mask / (1 - ratio), or 1."""
    x, ratio, training = n["data"], n.get("ratio"), n.get("training_mode")
    mode = e.number_of(training)
    share = _share(e, ratio)
    if training is None or mode is False or share == 0:
        return {"data": lambda: 1}

    def local() -> ir.Value:
        kept: ir.Value | float = 1 / (1 - share) if share is not None else _inverse_of_kept(e, ratio, x)
        if mode is None:
            kept = e.where(training, kept if isinstance(kept, ir.Value) else e.scalar(kept, x), 1)
        return e.mul(e.mask(_mask(e, n), x), kept)

    return {"data": local}


def _share(e: Emitter, ratio: ir.Value | None) -> float | None:
    """The share that is dropped, if known while building; by default one half."""
    return 0.5 if ratio is None else e.number_of(ratio)


def _inverse_of_kept(e: Emitter, ratio: ir.Value | None, like: ir.Value) -> ir.Value:
    assert ratio is not None
    share = e.cast(ratio, like.dtype or ir.DataType.FLOAT)
    return e.op("Reciprocal", e.sub(1, share))


def _mask(e: Emitter, n: Call) -> ir.Value:
    """The node's second result, declared if it is not there yet."""
    node = n.node
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:  # an unnamed optional result would be removed as unused
        taken = {
            v.name for v in (*e.graph.inputs, *e.graph.initializers.values(), *(o for m in e.graph for o in m.outputs))
        }
        mask.name = f"{n.y.name}_mask"
        while mask.name in taken:
            mask.name += "_"
    mask.dtype = ir.DataType.BOOL
    if mask.shape is None and n["data"].shape is not None:
        mask.shape = n["data"].shape
    return mask
