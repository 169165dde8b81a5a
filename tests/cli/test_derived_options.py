"""Options follow from functions: each argument has an option or a reason, with one text and one default."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from pkgutil import resolve_name
from typing import Any

import pytest
import typer.main

import onnx_convgrad as og
from onnx_convgrad.base.arguments import argument
from onnx_convgrad.bench.measure import bench
from onnx_convgrad.cli.app import app
from onnx_convgrad.cli.attribute import METHODS, AttributeOptions
from onnx_convgrad.cli.quantize import QuantizeOptions
from onnx_convgrad.cli.shared_options import DataOptions
from onnx_convgrad.cli.train_config import PANELS, Config
from onnx_convgrad.evaluation.map_folder import map_folder
from onnx_convgrad.evaluation.mapper import Mapper
from onnx_convgrad.pipeline.command_options import written
from onnx_convgrad.pipeline.options import PARTS, Loading, Memory, Options, Target, options_of
from tests.support.command_line import invoke
from tests.support.numeric import check

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "augment": [og.load, og.augment],
    "explain": [og.load, og.explain],
    "lower": [og.load, og.transforms.lower_gradient_ops],
    "check": [og.load, check],
    "bench": [og.load, bench],
    "train": [og.build_training, og.Trainer, og.Trainer.fit],
    "predict": [og.predict],
    "evaluate": [og.evaluate],
    "quantize": [og.transforms.quantize],
    "attribute": [getattr(og.attribution, method) for method in METHODS],
    "map": [map_folder, Mapper],
}
"""Command -> the functions that it calls with its options."""

OTHER_NAMES = {
    "check": {"samples": "--directions"},
    "bench": {"repeats": "--repeat", "depth": "--layers", "options": "--training"},
    "train": {"quantization": "--qat", "privacy": "--private", "metrics": "--metric", "options": "--threads",
              "callbacks": "--patience", "progress": "--quiet", "sample_weight": "--loss-option"},
    "predict": {"output": "--of", "options": "--threads"},
    "evaluate": {"output": "--of", "names": "--map", "options": "--threads"},
    "quantize": {"per_channel": "--per-tensor"},
    "attribute": {"samples": "--noisy-samples"},
    "map": {"output": "--out", "options": "--threads", "progress": "--quiet"},
}  # fmt: skip
"""Command -> argument -> an option with another name, or one of the several that it becomes."""

EVERYWHERE = {
    "self": "the object",
    "model": "an argument of the command",
    "data": "an argument of the command",
    "base_dir": "a command reads a file, whose folder is known",
}
_CARRIES_NOTHING = {"states": "of use where streams run: in train, predict and evaluate"}
REASONS = {
    **dict.fromkeys(("augment", "explain", "lower", "check", "bench"), _CARRIES_NOTHING),
    "train": {
        "program": "the command builds it",
        "outputs": "a file is trained with all its outputs",
        "unbiased_variance": "the file computes as PyTorch does",
        "distributed": "mpiexec or torchrun decides",
        "group_by_length": "files hold no sequences of different lengths",
    },
    "quantize": {"names": "names and order of the files settle it"},
    "attribute": {
        "relu": "of interest to further computation, not to a picture",
        "absolute": "of interest to further computation, not to a picture",
        "input": "images go to the only input that takes them",
        "target": "the explanation is computed here",
        "seed": "the same command draws the same picture",
        "baseline": "an array",
        "noise_input": "of interest to further computation, not to a picture",
    },
}
"""Command -> argument -> why it has no option."""

GIVEN: list[type] = [Options, Target, Memory, Loading, Config, DataOptions, QuantizeOptions, AttributeOptions]
OWN_DEFAULTS = {"epochs": "a run trains for long", "wrt": "the command says parameters"}
"""Field -> why its default differs from that of the argument."""


def offered(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


def documented() -> Iterator[tuple[Field[Any], str, str]]:
    """Each field that stands for an argument, with its place and name."""
    for kind in GIVEN:
        for own in options_of(kind):
            for one in own.metadata.get("options", ())[:1]:
                if one.of and not one.of.endswith("()"):
                    place, _, named = one.of.removesuffix(")").partition("(")
                    yield own, place, named or own.name


def without_option(command: str) -> set[str]:
    """The arguments of the functions of a command that have no option of their name."""
    there, missing = offered(command), set()
    for name in {name for function in FUNCTIONS[command] for name in inspect.signature(function).parameters}:
        parts = {field.name for field in fields(PARTS[name])} if name in PARTS else {name}
        own = [
            one
            for kind in (Options, Loading)
            for field in options_of(kind)
            if field.name in parts
            for one in written(field)
        ]
        if not there & {f"--{name.replace('_', '-')}", *(one.names[-1].partition("/")[0] for one in own)}:
            missing.add(name)
    return missing


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_argument_of_a_function_has_an_option_or_a_reason(command: str) -> None:
    others, reasons = OTHER_NAMES.get(command, {}), REASONS.get(command, {})
    assert set(others.values()) <= offered(command)
    missing = without_option(command) - EVERYWHERE.keys()
    assert missing - others.keys() - reasons.keys() == set(), "Give these arguments an option, or a reason."
    assert others.keys() | reasons.keys() == missing, "These arguments are gone, or have an option now."


def test_an_option_has_the_text_the_default_and_the_type_of_its_argument() -> None:
    found = list(documented())
    assert len(found) > 80
    for own, place, name in found:
        module, _, qualified = place.partition(":")
        parameter = inspect.signature(resolve_name(f"onnx_convgrad.{module}:{qualified}")).parameters[name]
        read = argument(place, name)
        assert re.fullmatch(r"[^\s].*[.]", read.sentence), f"{place}({name}): {read.sentence}"
        if type(parameter.default) in {str, int, float, bool}:
            assert read.default in (parameter.default, None), f"{place}({name})"
            if own.default not in (None, (), parameter.default):
                assert own.name in OWN_DEFAULTS, f"{own.name} is {own.default}, of the function {parameter.default}"
        kind = f"{own.type}".removesuffix(" | None")
        if kind in {"int", "float", "bool"}:
            assert kind in f"{parameter.annotation}" or kind == "bool", f"{own.name}: {kind}"


def test_the_help_names_the_default_of_the_command() -> None:
    for name, command in COMMANDS.items():
        for one in (one for one in command.params if type(one.default) in {int, float, str}):
            shown = re.search(r"\[default: (.*)\]$", one.help or "")
            assert shown is None or shown[1] == str(one.default) or one.opts == ["--runtime"], f"{name} {one.opts}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_at_most_forty_options(command: str) -> None:
    assert len(re.findall(r"^  +-", invoke(command, "--help").stdout, re.MULTILINE)) <= 40
    assert ("--help-all" in offered(command)) == (len(COMMANDS[command].params) > 40)


def test_the_full_help_shows_every_option() -> None:
    text, short = invoke("train", "--help-all").stdout, invoke("train", "--help").stdout
    assert [name for name in offered("train") if not re.search(rf"(?<!\S){name}(?![\w-])", text)] == []
    listed = [name for names in PANELS.values() for name in names.split()]
    rare = [name for name in listed if name.endswith("*")]
    assert {name.rstrip("*") for name in listed} <= {field.name for field in fields(Config)}
    assert "--lora-alpha" not in short and "--input-shape" not in short and "--lr" in short
    assert rare and f"{len(rare)} more options: " in short and "more options" not in text
