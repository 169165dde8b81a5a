"""Tell by names and notes which stored values are parameters, and which values an exporter computed.

PyTorch's newer exporter notes the kind of initializers that it stored as they were. Of an initializer that it folded it
notes the names of all values on the way; parameters have dotted names, unless they belong to the outermost module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.frontend.exporters.pytorch import FOLDED, sources
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.notes import INITIALIZER_KIND

_CONSTANTS = re.compile(
    r"val_\d+|(arange|const|empty|eye|full|lift_fresh_copy|lifted_tensor|linspace|logspace|ones|scalar_tensor|zeros)"
    r"(_like)?(_default)?(_\d+)?|helper\.constant\.\d+|p2o\.[\w.]+"
)
"""Names of constants that an exporter makes: PyTorch's, or Paddle's (the last two)."""

_LAYOUTS = re.compile(
    r"(_to_copy|_unsafe_view|alias|cat|clone|contiguous|flatten|flip|getitem|movedim|numpy_t|permute|reshape|roll|select|slice"
    r"|split|squeeze|t|transpose|unbind|unsqueeze|val|view)(_\d+)?"
)
"""Names of values that hold the unchanged numbers of a parameter."""

_ARITHMETIC = re.compile(
    r"(abs|add|clamp|cos|cumsum|div|exp|expm1|floor|floor_divide|log|log1p|log2|log_softmax|matmul|maximum|mean|minimum|mm|mul"
    r"|neg|outer|pow|reciprocal|remainder|rsqrt|rsub|sigmoid|sign|sin|softmax|softplus|sqrt|square|stack|std|sub|sum|tanh|tril"
    r"|triu|var|where)(_\d+)?"
)
"""Names of values that are results of arithmetic."""

_MEMBER = re.compile(r"[^\W\d]\w*(\.\w+)+")


def stands_for_parameter(value: ir.Value) -> bool:
    """Whether a value was a parameter, or is folded from one, in a file that declares kinds.

    A folded value without dotted names counts as a constant if something other than a numbered constant was made for it. A
    weight that a normalization was fused into has a name but no notes.
    """
    kind, folded = (value.metadata_props.get(key) for key in (INITIALIZER_KIND, FOLDED))
    if kind is not None:
        return kind == "PARAMETER"
    if folded is None:
        return not _CONSTANTS.fullmatch(value.name or "")
    names = sources(value)
    if any("." in name for name in names):
        return True
    made = [name for name in names if _CONSTANTS.fullmatch(name)]
    return len(made) < len(names) and all(name.startswith("val_") for name in made) and not is_uniform(value)


def is_computed(value: ir.Value) -> bool:
    """Whether a folded value holds other numbers than the parameter that it was folded from."""
    if not sources(value):
        return False
    steps = {
        n for n in (*sources(value), value.name or "") if not _LAYOUTS.fullmatch(n) and not _CONSTANTS.fullmatch(n)
    }
    dotted = {name for name in steps if "." in name}
    return value.name in steps or len(steps - dotted) > (0 if dotted else 1)


def origins(names: Sequence[str]) -> list[str]:
    """Those of the names in a list of folded values that a computation starts from."""
    return [n for n in names if not any(kind.fullmatch(n) for kind in (_CONSTANTS, _LAYOUTS, _ARITHMETIC))]


def is_member_name(name: str) -> bool:
    """Whether a name is that of a parameter or buffer of a module, and not that of an exporter's constant."""
    return bool(_MEMBER.fullmatch(name)) and not _CONSTANTS.fullmatch(name)


def is_uniform(value: ir.Value) -> bool:
    """Whether a value is known to be all ones or all zeros."""
    numbers = constant_of(value)
    return numbers is not None and bool((numbers == 1).all() or (numbers == 0).all())
