"""Tell by names and notes which stored values are parameters, and which values an exporter computed.

PyTorch's newer exporter notes the kind of initializers that it stored as they were. Of an initializer that it folded it
notes the names of all values on the way; parameters have dotted names, unless they belong to the outermost module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
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

_OWN = re.compile(r"[^\W\d]\w*")

_VARIABLE = re.compile(r"ReadVariableOp|/read(:\d+)?$")
"""Names under which TensorFlow reads a variable."""

_CONSTANT_NAME = re.compile(
    r"const(ant)?([\W_\d]|$)|cst|ortshared|(^|[\W_])eps(ilon)?([\W_\d]|$)|_output_\d+$|/[xy](:\d+)?$|^\w*::|^\d+$",
    re.IGNORECASE,
)
"""Parts of names that converters and optimizers give to constants: /act/Constant_output_0, const_fold_opt__7, mul/y:0."""

_WRITTEN = (0.044715, 1.702, math.pi, math.e, math.sqrt(2 / math.pi), math.log(2))
"""Numbers in the formulas of activations."""


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


def is_argument(value: ir.Value) -> bool:
    """Whether a value is a number in a call of an operator, such as the bounds of ReLU6, which the exporter cast."""
    return [f"{name}_cast" for name in sources(value)] == [value.name]


def origins(names: Sequence[str]) -> list[str]:
    """The names, in a list of folded values, that a computation starts from."""
    return [n for n in names if not any(kind.fullmatch(n) for kind in (_CONSTANTS, _LAYOUTS, _ARITHMETIC))]


def is_member_name(name: str) -> bool:
    """Whether a name is that of a parameter or buffer of a module, and not that of an exporter's constant."""
    return bool(_MEMBER.fullmatch(name)) and not _CONSTANTS.fullmatch(name)


def is_variable_name(name: str, *, members: bool) -> bool:
    """Whether a converter stores variables under such a name, and constants under others.

    Args:
        name: Name of a stored value.
        members: The file has names of members of modules, so that those of the outermost module have no dots.
    """
    if is_constant_name(name):
        return False
    return is_member_name(name) or bool(_VARIABLE.search(name)) or (members and bool(_OWN.fullmatch(name)))


def is_constant_name(name: str) -> bool:
    """Whether a name is that of a constant, made by an exporter or an optimizer."""
    return bool(_CONSTANTS.fullmatch(name)) or (not is_member_name(name) and bool(_CONSTANT_NAME.search(name)))


def is_written_number(value: ir.Value) -> bool:
    """Whether a value of one element is a number of the kind that people write into formulas.

    These are whole numbers and their inverses, their roots, powers of ten, bounds of masks, and those of activations.
    """
    numbers = constant_of(value)
    if numbers is None or numbers.size != 1:
        return False
    number = abs(float(numbers.reshape(-1)[0]))
    if not math.isfinite(number) or number > 1e4 or number == 0:
        return True
    forms = [number, 1 / number, number**2, 1 / number**2, *(number / n for n in _WRITTEN)]
    accuracy = 4 * max(float(np.finfo(numbers.dtype).eps), 1e-7) if numbers.dtype.kind == "f" else 1e-2
    whole = any(0.5 < form < 1e6 and abs(form - round(form)) <= accuracy * form for form in forms)
    return whole or abs(math.log10(number) - round(math.log10(number))) < accuracy


def is_uniform(value: ir.Value) -> bool:
    """Whether a value is known to be all ones or all zeros."""
    numbers = constant_of(value)
    return numbers is not None and bool((numbers == 1).all() or (numbers == 0).all())
