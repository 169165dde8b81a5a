"""Builds with a memory budget: what must be known for one, and what is tried if the first build does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.ir.targets import Target
from onnx_convgrad.memory.budget import BudgetError, MemoryBudget
from onnx_convgrad.pipeline.options import Options

T = TypeVar("T")


def within_budget(options: Options, target: Target, run: Callable[[Options, Target], T]) -> T:
    """Run a build; if the memory budget is too small, run it again with loops that store less."""
    sparing = replace(target, stored=None)
    if options.memory_budget == "min":
        return run(options, sparing)
    try:
        return run(options, target)
    except BudgetError as tight:
        if not tight.loops:
            raise
        return run(replace(options, memory_budget=tight.wanted), sparing)


def check_known_sizes(graph: ir.Graph, budget: MemoryBudget) -> None:
    """Refuse a number of bytes for a graph whose sizes are not known."""
    unknown = next((v for v in graph.inputs if v.shape is None or any(not isinstance(d, int) for d in v.shape)), None)
    if unknown is not None and isinstance(budget, int):
        raise ArgumentError(
            f"memory_budget is a number of bytes, but the sizes of the input {unknown.name!r} are not known.",
            hint=f"Give them, as in {input_shape_option(graph.inputs)}, or a share such as memory_budget=0.5.",
        )
