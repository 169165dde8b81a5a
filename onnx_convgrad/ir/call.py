"""Access a node's operands and results by the names of the ONNX schema, and its attributes with defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.writer import DOMAIN

Int: TypeAlias = int  # `Call.int` hides the type inside the class


SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"{DOMAIN}::ConvInputGrad": (("dY", "W", "X_like"), ("dX",)),
    f"{DOMAIN}::ConvWeightGrad": (("X", "dY", "W_like"), ("dW",)),
    f"{DOMAIN}::ConvPerSampleGrad": (("X", "dY", "W_like"), ("dW",)),
    f"{DOMAIN}::ConvGradSquaredNorm": (("X", "dY", "W_like"), ("norm",)),
    f"{DOMAIN}::MaxPoolGrad": (("dY", "X"), ("dX",)),
    f"{DOMAIN}::StraightThrough": (("X", "scale", "zero_point", "Y"), ("Z",)),
    f"{DOMAIN}::ProductSquaredNorm": (("A", "B"), ("norm",)),
    f"{DOMAIN}::Center": (("X",), ("Y",)),
    f"{DOMAIN}::Covariance": (("X",), ("Y",)),
    f"{DOMAIN}::NormalizedKernel": (
        ("X", "W", "scale", "B", "rest", "covariance", "mapped", "inverse"),
        ("Y",),
    ),
    f"{DOMAIN}::MomentsOverRanks": (("X",), ("mean", "var", "count")),
    f"{DOMAIN}::SumOverRanks": (("X",), ("Y",)),
}
"""Operand and result names of operators that have no ONNX schema."""


@dataclass(slots=True)
class Call:
    """One node: operands and results by schema name, attributes with defaults.

    Attributes are read from the dict inside onnx_ir's, whose `get` takes ten times as long where there is none.
    """

    node: ir.Node
    names: tuple[tuple[str, ...], tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        node = self.node
        self.names = _names(node.domain, node.op_type, len(node.inputs), len(node.outputs))

    def __getitem__(self, name: str) -> ir.Value:
        """The operand `name`; it must be present."""
        value = self.get(name)
        if value is None:
            known = [operand.removesuffix("...") for operand in signature(self.node.domain, self.node.op_type)[0]]
            if stem(name) not in known:
                raise KeyError(f"{self.node.op_type} has no operand {name!r}, only {', '.join(known)}")
            raise UnsupportedCase(f"its operand {name} is missing.")
        return value

    def get(self, name: str) -> ir.Value | None:
        """The operand `name`, or `None` when it is absent or an empty string."""
        try:
            return self.node.inputs[self.names[0].index(name)]
        except (ValueError, IndexError):
            return None

    def out(self, name: str) -> ir.Value:
        """The result `name`."""
        return self.node.outputs[self.names[1].index(name)]

    @property
    def y(self) -> ir.Value:
        """The first result."""
        return self.node.outputs[0]

    @property
    def inputs(self) -> tuple[ir.Value | None, ...]:
        return tuple(self.node.inputs)

    def int(self, name: str, default: int) -> int:
        attr = self.node.attributes.data.get(name)
        try:
            return default if attr is None else attr.as_int()
        except TypeError:
            raise self._wrong(name, "an integer") from None

    def float(self, name: str, default: float) -> float:
        attr = self.node.attributes.data.get(name)
        try:
            return default if attr is None else attr.as_float()
        except TypeError:
            raise self._wrong(name, "a number") from None

    def string(self, name: str, default: str) -> str:
        attr = self.node.attributes.data.get(name)
        try:
            return default if attr is None else attr.as_string()
        except TypeError:
            raise self._wrong(name, "UTF-8 text") from None

    def ints(self, name: str) -> tuple[Int, ...] | None:
        attr = self.node.attributes.data.get(name)
        try:
            return None if attr is None else tuple(attr.as_ints())
        except TypeError:
            raise self._wrong(name, "a list of integers") from None

    @staticmethod
    def _wrong(name: str, kind: str) -> UnsupportedCase:
        return UnsupportedCase(f"its attribute {name} is not {kind}.")

    def attributes(self) -> dict[str, Any]:
        """All attributes as Python values, to emit the same operator again."""
        return {name: attr.value for name, attr in self.node.attributes.items()}


@lru_cache(maxsize=4096)
def signature(domain: str, op_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of an operator's operands and results; a variadic name ends in `...`."""
    key = f"{domain}::{op_type}" if domain else op_type
    if key in SIGNATURES:
        return SIGNATURES[key]
    try:
        schema = onnx.defs.get_schema(op_type, domain)
    except onnx.defs.SchemaError:
        return ("inputs...",), ("outputs...",)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic

    def names(parameters: Any) -> tuple[str, ...]:
        return tuple(p.name + ("..." if p.option == variadic else "") for p in parameters)

    return names(schema.inputs), names(schema.outputs)


@lru_cache(maxsize=4096)
def _names(domain: str, op_type: str, inputs: int, outputs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The signature for so many operands and results."""
    names = signature(domain, op_type)
    return _spread(names[0], inputs), _spread(names[1], outputs)


def _spread(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Expand a variadic name to one name `name.i` per operand."""
    if not names or not names[-1].endswith("..."):
        return names[:count]
    stem, fixed = names[-1][:-3], names[:-1]
    return (*fixed[:count], *(f"{stem}.{i}" for i in range(count - len(fixed))))


def stem(name: str) -> str:
    """The declared name of an operand: `inputs` for `inputs.3`."""
    return name.split(".", 1)[0]


def declare_signature(op: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the operands and results of an operator of another domain (`"my.domain::Op"`) for use in its rule."""
    SIGNATURES[op] = (tuple(inputs), tuple(outputs))
    signature.cache_clear()
    _names.cache_clear()
