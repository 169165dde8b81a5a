"""The protocols of the loop are all that its modules use of a trainer and of a run, and only a trainer sets its members."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnx_convgrad
from onnx_convgrad.training.protocols import Run, TrainerLike
from onnx_convgrad.training.trainer import Trainer

PACKAGE = Path(onnx_convgrad.__file__).parent
TRAINER = PACKAGE / "training" / "trainer.py"
LOOP = [path for path in sorted(PACKAGE.glob("training/*.py")) if path != TRAINER]
OTHERS = [path for path in sorted(PACKAGE.rglob("*.py")) if path != TRAINER]


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def used(path: Path, name: str) -> Iterator[ast.Attribute]:
    """The members that a module uses of what is called `name`, as in `name.member` and `self.name.member`."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if (isinstance(owner, ast.Name) and owner.id == name) or (
                isinstance(owner, ast.Attribute) and owner.attr == name
            ):
                yield node


def used_of_runs(path: Path) -> Iterator[ast.Attribute]:
    """The members that functions use of an argument `run: Run`."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef) and annotations(node).get("run") == "Run":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "run":
                    yield inner


def annotations(function: ast.FunctionDef) -> dict[str, str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {a.arg: "" if a.annotation is None else ast.unparse(a.annotation) for a in arguments}


def members(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def settable(protocol: type) -> set[str]:
    return {name for name, member in vars(protocol).items() if getattr(member, "fset", None) is not None}


def test_only_the_learning_rate_of_a_trainer_may_be_set() -> None:
    assert settable(TrainerLike) == {"learning_rate"}
    assert settable(Run) == set()


def test_nobody_else_sets_members_of_a_trainer() -> None:
    written = {
        (path.name, node.attr)
        for path in OTHERS
        for node in used(path, "trainer")
        if not isinstance(node.ctx, ast.Load)
    }
    assert {name for _, name in written} <= settable(TrainerLike), written


def test_only_the_loop_and_the_metrics_write_into_the_progress() -> None:
    written = {
        path.relative_to(PACKAGE).parts[0]
        for path in OTHERS
        for node in used(path, "progress")
        if not isinstance(node.ctx, ast.Load)
    }
    assert written <= {"training", "metrics"}


def test_nobody_calls_setattr_on_a_trainer() -> None:
    calls = [
        (path.name, node.lineno)
        for path in OTHERS
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("setattr", "delattr", "vars")
        and ast.unparse(node.args[0]).split(".")[-1] == "trainer"
    ]
    assert not calls


def test_the_loop_uses_the_members_of_the_protocol_and_the_protocol_has_no_others() -> None:
    assert {node.attr for path in LOOP for node in used(path, "trainer")} == members(TrainerLike)


def test_callbacks_read_the_members_of_a_run_and_a_run_has_no_others() -> None:
    found = [node for path in LOOP for node in used_of_runs(path)]
    assert all(isinstance(node.ctx, ast.Load) for node in found)
    assert {node.attr for node in found} == members(Run)


@pytest.mark.parametrize("path", LOOP, ids=lambda path: path.stem)
def test_arguments_have_the_types_of_the_protocol(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            assert annotations(node).get("trainer", "TrainerLike") == "TrainerLike", node.name
            assert annotations(node).get("run", "Run") != "", node.name


def test_a_trainer_has_the_members_of_the_protocol() -> None:
    stored = (node for node in nodes(TRAINER) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    attributes = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    assert members(TrainerLike) <= attributes | set(dir(Trainer))
