"""The names at the top of the package and the keywords of its functions, as read from the signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import onnx_convgrad as og
from onnx_convgrad.errors import ExecutionError

NAMES = """
    load save session Model
    augment vjp grad jvp hvp vmap jacobian hessian explain
    build_training TrainingProgram Trainer Privacy MixedPrecision
    predict evaluate
    Target Memory Limits
    ConvGradError
"""
MODULES = """
    functional losses optim schedules metrics data callbacks transforms attribution attacks curvature distributed federated
    torch jax errors
"""
BELOW = ("federated.flower", "pipeline.passes", "runtime", "testing")
"""Public modules that are imported by name."""

GONE = """
    ArgumentError CheckpointError DeviceProgram DifferentiationError DivergenceError ExecutionError InternalError LimitError
    LoweringError Mapper ModelError Report RuleContractError add_adapters explainers insert_quantizers load_adapters
    lower_gradient_ops merge_adapters optimize_for_device quantize replace_batchnorm replace_head unfold_batchnorm
"""
"""Names that the top had before 1.0."""

MOST = 16
"""Most keywords of a function."""

OWNERS = {
    "Target": "deterministic lowering max_workspace",
    "Memory": "budget recompute",
    "MixedPrecision": "master_weights",
    "load": "input_shapes input_values limits base_dir",
}
"""Class or function -> settings that are given to it, and to no function that takes its result."""

TOO = {
    "Model": "its fields are what `load` was given",
    "runtime.SessionOptions": "options of ONNX Runtime may have these names",
    "functional": "arrays are given, and the lowering is the only setting",
}
"""Other takers of these settings, or modules of such, with the reason."""


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Every public function, class and method by its name; modules whose library is not installed are left out."""
    found = dict(_members(og))
    for name in (*MODULES.split(), *BELOW):
        try:
            module = import_module(f"onnx_convgrad.{name}")
        except ExecutionError:
            continue
        found |= {f"{name}.{member}": thing for member, thing in _members(module)}
    return found


def _members(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        thing = None if name in MODULES.split() else getattr(module, name)
        if callable(thing):
            yield name, thing
        if inspect.isclass(thing) and thing.__module__.startswith("onnx_convgrad"):
            yield from ((f"{name}.{m}", v) for m, v in vars(thing).items() if callable(v) and not m.startswith("_"))


@cache
def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a function; none where Python knows no signature."""
    try:
        return dict(inspect.signature(functions()[name]).parameters)
    except ValueError:
        return {}


def keywords(name: str) -> list[str]:
    """Parameters that are given by keyword: those behind the star, and those with a default."""
    found = parameters(name).values()
    return [
        p.name for p in found if p.kind is p.KEYWORD_ONLY or (p.kind is not p.VAR_KEYWORD and p.default is not p.empty)
    ]


def test_the_top_has_these_names() -> None:
    names = {*og.__all__} - {"__version__"}
    assert names == {*NAMES.split(), *MODULES.split()}
    assert len(names) <= 40


@pytest.mark.parametrize("name", GONE.split())
def test_no_name_from_before_is_left_at_the_top(name: str) -> None:
    assert not hasattr(og, name)


def test_no_function_takes_more_than_16_keywords() -> None:
    assert {name: len(keywords(name)) for name in functions() if len(keywords(name)) > MOST} == {}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_setting_is_given_in_one_place(owner: str) -> None:
    assert {*OWNERS[owner].split()} <= {*parameters(owner)}
    others = [name for name in functions() if name not in (owner, *TOO) and name.partition(".")[0] not in TOO]
    found = {name: [key for key in OWNERS[owner].split() if key in parameters(name)] for name in others}
    assert {name: keys for name, keys in found.items() if keys} == {}


def test_wrt_comes_before_of() -> None:
    orders = {name: [key for key in parameters(name) if key in ("wrt", "of")] for name in functions()}
    assert {name: order for name, order in orders.items() if order == ["of", "wrt"]} == {}


def test_a_seed_is_a_number() -> None:
    kinds = {name: parameters(name)["seed"].annotation for name in functions() if "seed" in parameters(name)}
    assert {name: kind for name, kind in kinds.items() if "int" not in str(kind)} == {}
