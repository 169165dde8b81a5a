"""The facts of an operator stand beside its rule; lists of operators elsewhere are few, and each has a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnx

import onnx_convgrad

ROOT = Path(onnx_convgrad.__file__).parent
FEWEST = 4
"""Smallest number of operators in a collection that counts as a list."""

HOMES = (
    "rules",
    "frontend/opset",
    "ir/kernels.py",
    "ir/targets.py",
    "backends/webgpu_kernels.py",
    "backends/missing_operators.py",
)
"""Homes of facts: rules, conversions between opsets, and tables of what a provider has."""

SHAPES = "sizes of results, which must be known before any rule is asked"
FOLDING = "numbers of constants, which `ir` computes without knowing rules"
ORACLE = "an implementation that checks the rules, and so must not read them"
KERNELS = "what kernels of ONNX Runtime do, as measured or read in its source, whatever the operator means"
PRICES = "measured prices"
REWRITES = "its keys are the operators that a pass rewrites, each with the rewrite"
INTEGERS = "operators on stored integers, which have no derivative and so no rule with facts"

LISTS = {
    "backends.cpu.fast_activations.ACTIVATIONS": REWRITES,
    "backends.cpu.fast_broadcasts.BROADCASTS": REWRITES,
    "backends.cpu.fast_forms._SUMS_AND_GATES": REWRITES,
    "backends.cpu.fast_products.PRODUCTS": REWRITES,
    "backends.cuda.batched_updates._OPERATORS": KERNELS,
    "backends.runtime_faults._PROPAGATED": KERNELS,
    "backends.runtime_faults._REWRITES": REWRITES,
    "checking.case._MULTILINEAR": ORACLE,
    "checking.float64_kernels.KERNELS": ORACLE,
    "checking.rounding._ROUNDING": ORACLE,
    "checking.torch_gradients.OPERATORS": ORACLE,
    "checking.torch_shapes.LAYOUT": ORACLE,
    "attribution.walks._ACTIVATIONS": "functions through which relevance passes unchanged, by convention",
    "frontend.sequences._HANDLED": REWRITES,
    "frontend.quantized._HANDLERS": REWRITES,
    "frontend.quantizers._QUANTIZERS": INTEGERS,
    "frontend.roles.LAYOUT_CHANGES": "what exporters put between a weight and its layer; a Gather there is the layer",
    "frontend.shapes.infer._RANKS": SHAPES,
    "frontend.shapes.shape_rules_layout.CORRECTIONS": SHAPES,
    "frontend.shapes.shape_rules_memo.REMEMBERED": SHAPES,
    "frontend.shapes.shape_rules_ml.RULES": SHAPES,
    "frontend.usable._NEED_TYPES": "operators whose inference in onnx ends the process without types",
    "ir.constants.RANDOM_SOURCES": "the Emitter must not emit one of two equal nodes, and knows no rules",
    "ir.constants._FOLDS": FOLDING,
    "ir.writer._ELEMENTWISE": SHAPES,
    "ir.writer._PLAIN": SHAPES,
    "lowering.cost.movement.MOVEMENT": PRICES,
    "lowering.cost.products.PRODUCTS": PRICES,
    "memory.in_place._KERNELS": KERNELS,
    "programs.precision._TYPES": "operators that lose little in 16 bits, and that CUDA has in them",
    "programs.ranges._FUNCTIONS": "arithmetic on bounds that are known while building",
}
"""Collections of operators outside their homes, each with the reason why it is not a fact of a rule."""

MOST = 31
"""Most lists outside the homes."""

MODULES = {"Conv": 34, "Gather": 22}
"""Operator -> most modules that name it."""


@cache
def operators() -> frozenset[str]:
    return frozenset(schema.name for schema in onnx.defs.get_all_schemas_with_history())


def named(tree: ast.AST) -> set[str]:
    """The operators in the strings of an expression, alone or as words of a list; prose does not count."""
    strings = (n.value.split() for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {word for words in strings for word in words if 2 * len(operators() & {*words}) >= len(words)} & operators()


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def collections(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names of values, and of what has decorators, each with the expression."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target), node.value
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from ((f"@{node.name}", decorator) for decorator in node.decorator_list)
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", value) for name, value in collections(node.body))


def test_lists_of_operators_outside_the_rules_have_a_reason() -> None:
    found = {
        f"{path.removesuffix('.py').replace('/', '.')}.{name}"
        for path, tree in modules()
        if not path.startswith(HOMES)
        for name, value in collections(tree.body)
        if len(named(value)) >= FEWEST
    }
    new, stale = sorted(found - LISTS.keys()), sorted(LISTS.keys() - found)
    assert not new, (
        f"lists of operators outside the rules: make a fact of them (autodiff.registry), or say why not: {new}"
    )
    assert not stale, f"these lists are gone, and their reasons should be, too: {stale}"
    assert all(LISTS.values())
    assert len(LISTS) <= MOST


def test_no_more_modules_name_an_operator_than_before() -> None:
    strings: dict[str, set[str]] = {op: set() for op in MODULES}
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in MODULES:
                strings[node.value].add(path)
    counts = {op: len(paths) for op, paths in strings.items()}
    assert all(counts[op] <= most for op, most in MODULES.items()), f"{counts}; at most {MODULES}"
