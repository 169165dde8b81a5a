"""Mixed precision: rewrite matrix products and convolutions to a narrow type, and keep sums in float32.

Operators of a first list compute in float16 or bfloat16. Their float32 operands, parameters included, pass through a Cast,
whose gradient is a Cast back, so that parameters, their gradients and the optimizer state stay in float32. Operators of a
second list compute in the type of their operands. All others compute in float32. Micikevicius et al., "Mixed Precision
Training" (2018).

A model may also have float16 or bfloat16 parameters itself. Their updates are often smaller than half the distance of two
such numbers, and would be lost. So a float32 copy of the parameter, its master, is updated, with the optimizer's state in
float32, and the parameter is that copy, rounded. Masters are further state of the optimizer, in the slot `master`; an
average of the parameter has a float32 copy, too, in the slot `ema_master`. Parameters, gradients and the exported model keep
the dtype of the model; checkpoints hold both. A running statistic is the average of its master, rounded: a variance is
often beyond the largest float16 number, 65504, to which it is limited, and its average moves in steps that float16 would
lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import above_zero, check_fields, flag, positive, share, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.kernels import CUDA_TYPES
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.notes import REPLACEABLE
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.manifest import Manifest, Port


@dataclass(frozen=True, slots=True)
class Narrow:
    """A narrow type.

    Attributes:
        largest: The largest number of the type.
    """

    dtype: ir.DataType
    largest: float

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return self.dtype.name.lower()

    def computes(self, node: ir.Node) -> bool:
        """Whether a node is a product that CUDA computes in this type."""
        rule = rule_of(node)
        multiplies = rule is not None and (rule.kind == "multilinear" or layer_of(node) is not None)
        return multiplies and self.name in CUDA_TYPES.get(node.op_type, ())

    def follows(self, node: ir.Node) -> bool:
        """Whether a node computes in the type of its operands."""
        return self.name in _FOLLOWING.get(node.op_type, ())


NARROW = {
    "float16": Narrow(ir.DataType.FLOAT16, float(np.finfo(np.float16).max)),
    "bfloat16": Narrow(ir.DataType.BFLOAT16, 3.38e38),
}


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The types in which a training step computes. The loss is scaled for float16, as by `torch.amp.GradScaler`.

    Args:
        dtype: `"float32"`: the types of the model. `"float16"`: convolutions and matrix products in float16, with float32
            parameters and dynamic loss scaling. `"bfloat16"` (CUDA): matrix products and operators that move their operands
            in bfloat16, with float32 parameters; convolutions stay in float32, because CUDA has no bfloat16 convolution up
            to opset 21.
        master_weights: Update float16 and bfloat16 parameters of the model in float32. The optimizer's state is float32,
            too; the parameters are these numbers, rounded. `False`: update them as they are, which loses small updates.
        init_scale: The first scale of the loss.
        growth_factor: Factor of the scale after `growth_interval` successful steps in a row.
        backoff_factor: Factor of the scale after a step that overflowed.
        growth_interval: Number of successful steps until the scale grows.

    Raises:
        ArgumentError: An unknown type, or a number out of range.
    """

    dtype: str = "float32"
    _: KW_ONLY
    master_weights: bool = True
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    checks: ClassVar = {
        "master_weights": flag,
        "init_scale": above_zero,
        "backoff_factor": partial(share, zero=False),
        "growth_factor": positive,
        "growth_interval": whole,
    }

    def __post_init__(self) -> None:
        check_names([self.dtype], ["float32", *NARROW], "precision")
        check_fields(self)
        if self.growth_factor < 1:
            raise ArgumentError(f"growth_factor must be at least 1, not {self.growth_factor!r}.")

    @classmethod
    def of(cls, given: PrecisionLike) -> MixedPrecision:
        """Settings as they are, or those of a type with defaults.

        Args:
            given: Settings, or the type.
        """
        return given if isinstance(given, MixedPrecision) else cls(given)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled."""
        return self.dtype == "float16"


PrecisionLike = MixedPrecision | str
"""Settings, or the type alone."""
"""Precision of a training program -> narrow type."""

_TYPES = {
    "float16 bfloat16": "Add Concat Expand Flatten Identity Mul Neg Reshape Split Squeeze Sub Sum Transpose Unsqueeze",
    # Up to opset 21 CUDA has no pool, comparison or Pad (the gradient of Slice) in bfloat16.
    "float16": "Abs AveragePool BatchNormalization Clip DepthToSpace Div Dropout Elu Gather Gelu GlobalAveragePool "
    "GlobalMaxPool HardSigmoid HardSwish LeakyRelu Max MaxPool Min Mish PRelu Pad Relu Resize Selu Sigmoid Slice Softsign "
    "SpaceToDepth Tanh Tile Where",
}
_FOLLOWING = {op: types.split() for types, operators in _TYPES.items() for op in operators.split()}
"""Operator -> the types in which it and its gradient lose little, and which CUDA has for both."""

_FLOAT = ir.DataType.FLOAT


def to_narrow(draft: Draft, narrow: Narrow) -> None:
    """Rewrite the model of a draft in place; inputs and outputs keep their dtypes.

    Raises:
        ArgumentError: The model has control flow, whose bodies are not rewritten.
    """
    graph, e = draft.graph, draft.e
    outputs = [(v, v.dtype) for v in graph.outputs]
    with draft.named("precision"):
        for node in list(graph):
            if any(captured_values(node)):
                raise ArgumentError(
                    f"Node {node.name!r} ({node.op_type}) has a body, which cannot be converted to {narrow.dtype.name}.",
                    hint="Use precision='float32'.",
                )
            e.anchor = node
            _convert(e, node, narrow)
        e.anchor = None
        for i, (value, dtype) in enumerate(outputs):
            if value.dtype != dtype:
                graph.outputs[i] = e.cast(value, dtype or _FLOAT)
                value.name, graph.outputs[i].name = e.names.claim(f"{value.name}_inner"), value.name
    draft.restart()


def _convert(e: Emitter, node: ir.Node, narrow: Narrow) -> None:
    """Cast the operands of a node to the type in which it computes."""
    known = not node.domain and (narrow.computes(node) or narrow.follows(node))
    typed = list(_typed(node, "inputs")) if known else []
    operands = [node.inputs[i] for i in typed]
    half = bool(typed) and _computes_narrow(node, operands, narrow)
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype not in (_FLOAT, narrow.dtype):
            continue
        wanted = narrow.dtype if half and i in typed else _FLOAT
        tensor = value.const_value if _constant(value) and REPLACEABLE not in value.meta else None
        if tensor is not None and value.dtype != wanted:  # not of frozen weights, which may be replaced
            node.replace_input_with(i, e.const(tensor.numpy().astype(wanted.numpy())))
        elif value.dtype != wanted:
            node.replace_input_with(i, e.cast(value, wanted))
    if half:
        for i in _typed(node, "outputs"):
            if node.outputs[i].dtype == _FLOAT:
                node.outputs[i].type = ir.TensorType(narrow.dtype)  # a new object: copies of a model share types


def _computes_narrow(node: ir.Node, operands: list[ir.Value | None], narrow: Narrow) -> bool:
    floating = [v for v in operands if v is not None and v.dtype in (_FLOAT, narrow.dtype)]
    if not all(_fits(v, narrow) for v in floating):
        return False
    if narrow.computes(node):
        return True
    voting = [v for v in floating if not v.is_initializer()]
    return bool(voting) and all(v.dtype == narrow.dtype for v in voting)


def _constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _fits(value: ir.Value, narrow: Narrow) -> bool:
    """Whether the narrow type can hold the numbers of a constant; True for other values."""
    if not _constant(value) or value.const_value is None or value.dtype == narrow.dtype:
        return True
    numbers = value.const_value.numpy()
    return bool((np.abs(numbers[np.isfinite(numbers)]) <= narrow.largest).all())


def _typed(node: ir.Node, side: Literal["inputs", "outputs"]) -> Iterator[int]:
    """Indices of the operands, or of the results, whose type the schema ties to that of the first result."""
    schema = onnx.defs.get_schema(node.op_type, CANONICAL_OPSET)
    declared = getattr(schema, side)
    for i in range(len(getattr(node, side))):
        if declared[min(i, len(declared) - 1)].type_str == schema.outputs[0].type_str:
            yield i


# -- masters -----------------------------------------------------------------------------------------------------------

WIDE = "float32"
"""Dtype of masters."""

MASTER, AVERAGE, AVERAGE_MASTER = "master", "ema", "ema_master"
"""Slots: the master, the average of the parameter, and the master of that."""


def slots(port: Port, own: Iterable[str], *, average: bool, masters: bool) -> Iterator[tuple[str, str]]:
    """Slot and dtype of all state of a parameter; `own` are the slots of the optimizer."""
    kept = masters and port.dtype in NARROW
    for slot in own:
        yield slot, WIDE if kept or "int" in port.dtype else port.dtype
    if average:
        yield AVERAGE, port.dtype
    if kept:
        yield MASTER, WIDE
        if average:
            yield AVERAGE_MASTER, WIDE


def masters_of(manifest: Manifest, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The masters of those of the values that have one, by the masters' names."""
    averages = {s.of: s.name for s in manifest.state if s.slot == AVERAGE}
    copied = {}
    for s in manifest.state:
        source = s.of if s.slot == MASTER else averages.get(s.of) if s.slot == AVERAGE_MASTER else None
        if source is not None and source in values:
            copied[s.name] = np.asarray(values[source], s.dtype)
    return copied
