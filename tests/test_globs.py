"""Names and globs mean the same wherever they are taken: one table, and a test for each place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.selection import resolve_of, resolve_wrt
from onnx_convgrad.memory.selection import choose_values
from onnx_convgrad.programs.plan import frozen_nodes, grouped, output_names, parameter_names
from tests.support.one_input import graph_of

NAMES = ["enc.0.w", "enc.1.w", "Enc.w", "l[0].w", "l0.w", "tf/dense/kernel:0"]

TABLE = {
    "enc.*": ["enc.0.w", "enc.1.w"],  # a star crosses dots
    "e*w": ["enc.0.w", "enc.1.w"],  # case counts
    "enc.?.w": ["enc.0.w", "enc.1.w"],
    "[eE]nc.w": ["Enc.w"],
    "tf/*": ["tf/dense/kernel:0"],  # and slashes
    "l[0].w": ["l[0].w"],  # a name wins over its reading as a glob
    "l[0].*": ["l0.w"],
    "l[[]0].*": ["l[0].w"],
    "*": NAMES,
}

BY_NODE = {"/n/enc/*": ["enc.0.w", "enc.1.w"], "/n/l/4": ["l0.w"]}
"""Globs and names of nodes, which select the parameters that they read."""

table = pytest.mark.parametrize("pattern", TABLE)
parameters = pytest.mark.parametrize(("pattern", "expected"), [*TABLE.items(), *BY_NODE.items()])


def network(*, results: bool = False) -> onnx.ModelProto:
    """A chain of products whose weights, or else whose `results`, have the names of the table."""
    scopes = ["enc/0", "enc/1", "Enc", "l/3", "l/4", "tf"]
    text, before = [], "x"
    for i, name in enumerate(NAMES):
        weight, result = (f"p{i}", name) if results else (name, f"h{i}")
        text.append(f'"{result}" = MatMul ({before}, "{weight}")')
        before = f'"{result}"'
    outputs = ", ".join(f'float[N,2] "{name}"' for name in NAMES) if results else "float[N,2] h5"
    weights = {f"p{i}" if results else name: np.full((2, 2), 0.1 + i, np.float32) for i, name in enumerate(NAMES)}
    model = graph_of(f"(float[N,2] x) => ({outputs}) {{ {' '.join(text)} }}", **weights)
    for node, scope in zip(model.graph.node, scopes, strict=True):
        node.name = f"/n/{scope}"
    return model


def graph(**options: bool) -> Any:
    return load(network(**options)).canonical.graph


@parameters
def test_wrt(pattern: str, expected: list[str]) -> None:
    skipped = ["x"] if pattern == "*" else []  # inputs have derivatives, too
    found = [v.name for v in resolve_wrt(graph(), [pattern]) if v.name not in skipped]
    assert found == expected if pattern not in BY_NODE else sorted(found) == sorted(expected)


@parameters
def test_trained_and_frozen_parameters(pattern: str, expected: list[str]) -> None:
    assert list(parameter_names(graph(), [pattern], ())) == expected
    if expected != NAMES:
        assert list(parameter_names(graph(), "parameters", pattern)) == [n for n in NAMES if n not in expected]


@parameters
def test_groups(pattern: str, expected: list[str]) -> None:
    optimizer = grouped(og.optim.SGD(lr=1.0, groups={"*": {"lr": 3.0}, pattern: {"lr": 0.5}}), graph(), NAMES)
    assert [name for name in NAMES if optimizer.of(name)[1] == 0.5] == expected
    assert {optimizer.of(name)[1] for name in NAMES if name not in expected} <= {3.0}


@table
def test_targets_and_outputs(pattern: str) -> None:
    results = graph(results=True)
    assert [v.name for v in resolve_of(results, [pattern])] == TABLE[pattern]
    assert list(output_names(results, pattern)) == TABLE[pattern]


@table
def test_frozen_statistics(pattern: str) -> None:
    nodes = " ".join(f'"y{i}" = BatchNormalization (x, s, b, "{name}", v)' for i, name in enumerate(NAMES))
    stored = {name: np.ones(2, np.float32) for name in (*NAMES, "s", "b", "v")}
    outputs = ", ".join(f"float[N,2] y{i}" for i in range(len(NAMES)))
    normalized = load(graph_of(f"(float[N,2] x) => ({outputs}) {{ {nodes} }}", **stored)).canonical.graph
    chosen = frozen_nodes(normalized, [pattern])
    assert [n.inputs[3].name for n in normalized if n.name in chosen] == TABLE[pattern]


@table
def test_recomputed_values(pattern: str) -> None:
    values = [ir.Value(name=name) for name in NAMES]
    kept: Any = SimpleNamespace(families={v: [v] for v in values}, kept=values, refusal=lambda _: None, groups=list)
    assert [v.name for v in choose_values(kept, [pattern], 1.0)] == TABLE[pattern]  # type: ignore[attr-defined]


PLACES: dict[str, Callable[[str], Any]] = {
    "value in wrt": lambda glob: og.augment(network(), wrt=glob),
    "value in of": lambda glob: og.augment(network(), of=glob),
    "forward value in recompute": lambda glob: og.augment(network(), memory=og.Memory(recompute=glob)),
    "initializer in freeze": lambda glob: program(freeze=glob),
    "parameter in groups": lambda glob: program(optimizer=og.optim.SGD(groups={glob: {"lr": 1}})),
    "output": lambda glob: program(outputs=glob),
    "BatchNormalization or statistic in freeze_statistics": lambda glob: program(freeze_statistics=glob),
}


def test_outputs_are_names() -> None:
    with pytest.raises(og.errors.ArgumentError, match=r"^outputs takes a name or several, not \[1\]"):
        program(outputs=[1])


def program(**options: Any) -> Any:
    return og.build_training(network(), **{"loss": "mse", "optimizer": og.optim.SGD(0.1), **options})


@pytest.mark.parametrize("place", PLACES)
def test_a_glob_without_a_match_is_an_error(place: str) -> None:
    with pytest.raises(og.errors.ArgumentError) as caught:
        PLACES[place]("emc.*")
    message = str(caught.value)
    assert f"Unknown {place}" in message and "'emc.*', a glob that matches nothing" in message
    assert "inspect MODEL` lists the names" in message
    if place in ("value in wrt", "initializer in freeze", "parameter in groups"):
        assert "Did you mean 'enc.*'" in message


def test_globs_in_training_mean_no_inputs_results_or_constants() -> None:
    stored = {"a/w": np.ones((2, 2), np.float32), "a/eps": np.array(1e-3, np.float32)}
    text = '(float[N,2] "a/x") => (float[N,2] "a/y") { "a/h" = MatMul ("a/x", "a/w") "a/y" = Add ("a/h", "a/eps") }'
    model = load(graph_of(text, **stored)).canonical.graph
    with pytest.warns(UserWarning, match=r"'a/eps' match a glob in wrt, but look like constants"):
        assert parameter_names(model, "a/*", ()) == ("a/w",)
    assert parameter_names(model, "a/eps", ()) == ("a/eps",)
    with pytest.warns(UserWarning, match="look like constants"):
        assert [v.name for v in resolve_wrt(model, "a/*")] == ["a/x", "a/w"]
    assert [v.name for v in resolve_wrt(model, "a/[hy]")] == ["a/h", "a/y"]


def test_freezing_a_statistic_points_to_freeze_statistics() -> None:
    with pytest.raises(
        og.errors.ArgumentError, match=r"'bn1\.running_mean' is a running statistic.*Use freeze_statistics"
    ):
        og.build_training(
            "examples/models/digits_cnn.onnx", loss="cross_entropy", optimizer=og.optim.SGD(0.1), freeze="*running*"
        )
