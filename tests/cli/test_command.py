"""Every command offers the options of its function, from the dataclass that both share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer.main

import onnx_convgrad as og
from onnx_convgrad.bench.measure import bench
from onnx_convgrad.cli.app import app
from onnx_convgrad.cli.command import parsed
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.pipeline.command_options import written
from onnx_convgrad.pipeline.options import PARTS, Loading, Memory, Options, Target, options_of
from tests.support.command_line import invoke
from tests.support.numeric import check

OPTIONS = {f.name: f for kind in (Options, Loading) for f in options_of(kind)}
SPELLED = {name: [o.names[-1].partition("/")[0] for o in written(field)] for name, field in OPTIONS.items()}
OTHER_PROVIDERS = {"name", "deterministic"}
"""`bench` measures the CPU."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "augment": og.augment,
    "explain": og.explain,
    "lower": og.transforms.lower_gradient_ops,
    "check": check,
    "train": og.build_training,
}


def offered(command: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {name for parameter in group.commands[command].params for name in parameter.opts}


def taken(function: Callable[..., Any]) -> set[str]:
    """The fields of `Options` among a function's keywords, with those of `target`, `memory` and `og.load`."""
    names = set(inspect.signature(function).parameters)
    parts = {field.name for part in names & set(PARTS) for field in fields(PARTS[part]) if field.name in OPTIONS}
    return (names & set(SPELLED)) | parts | {field.name for field in fields(Loading)}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_command_offers_the_options_of_its_function(command: str) -> None:
    wanted = {name for field in taken(FUNCTIONS[command]) for name in SPELLED[field]}
    assert wanted and wanted <= offered(command)


def test_bench_offers_every_option_that_concerns_the_cpu() -> None:
    assert inspect.signature(bench).parameters["options"].annotation == "Options"
    assert offered("bench") >= {n for field, names in SPELLED.items() if field not in OTHER_PROVIDERS for n in names}


@pytest.mark.parametrize("function", [og.augment, og.vjp, og.grad, og.jvp, og.hvp, og.explain])
def test_keywords_agree_with_the_options(function: Callable[..., Any]) -> None:
    found = inspect.signature(function).parameters
    assert {"training", "trainable_inputs", "straight_through", "target", "memory"} <= set(found)
    assert (found["target"].default, found["memory"].default) == (Target().name, Memory().budget)
    for field in fields(Options):
        if field.name in found and found[field.name].default is not inspect.Parameter.empty and field.name not in PARTS:
            assert field.name == "outputs" or found[field.name].default == field.default


def test_a_toml_file_may_hold_every_option_of_train() -> None:
    keys = {f"--{f.name.replace('_', '-')}".replace("-options", "-option") for f in fields(Config)}
    not_stored = {
        "--resume",
        "--config",
        "--find-lr",
        "--verbose",
        "--quiet",
        "--json",
        "--help",
        "--help-all",
        "--no-shuffle",
    }
    assert {name for name in offered("train") if name.startswith("--")} - not_stored <= keys


def test_values_become_fields() -> None:
    given = {"wrt": ["a,b"], "max_workspace": "1.5GB", "per_sample": None, "squared_norm": True, "of": [], "rest": 1}
    target = Target(max_workspace=1_500_000_000)
    assert parsed(Options, given) == {"wrt": ["a", "b"], "target": target, "per_sample": "squared_norm"}
    assert given == {"rest": 1}
    assert parsed(Options, {"max_workspace": None, "recompute": [], "training": None}) == {}
    assert parsed(Loading, {"input_shape": None}) == {}


@pytest.mark.parametrize("command", ["augment", "explain", "lower", "check", "bench", "train", "rules"])
def test_help_has_an_example_that_fits_a_terminal(command: str) -> None:
    result = invoke(command, "--help")
    assert "Example:" in result.stdout
    examples = [line for line in result.stdout.splitlines() if f"onnx-convgrad {command}" in line]
    assert examples and max(map(len, examples)) <= 84
