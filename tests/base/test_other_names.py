"""An error about an unknown name says which name to use."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import typer

import onnx_convgrad as og
from onnx_convgrad.base.other_names import ATTRIBUTES, KEYWORDS, PUBLIC, WORDS, _members
from onnx_convgrad.cli.app import app

FUNCTIONS = [
    *(getattr(og, name) for name in og._HOME),
    og.Trainer.fit,
    *(getattr(module, name) for module in (og.attacks, og.attribution, og.transforms) for name in module.__all__),
]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _missing(path: str) -> str:
    """The message of the error for an attribute, such as `optim.Cosine` of the package."""
    module, _, name = path.rpartition(".")
    try:
        getattr(getattr(og, module) if module else og, name)
    except AttributeError as problem:
        return f"{problem}"
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("replace_head", "Use onnx_convgrad.transforms.replace_head."),
        ("ArgumentError", "Use onnx_convgrad.errors.ArgumentError."),
        ("optim.Cosine", "Use onnx_convgrad.schedules.Cosine."),
        ("callbacks.ReduceOnPlateau", "Use onnx_convgrad.schedules.Plateau."),
        ("schedules.CosineAnnealingLR", "Use onnx_convgrad.schedules.Cosine."),
        ("explainers", "Use onnx_convgrad.attribution."),
        ("losses.CrossEntropyLoss", "Did you mean 'CrossEntropy'?"),
        ("attribution.GradCAM", "Did you mean 'grad_cam'?"),
        ("data.DataLoader", "Use onnx_convgrad.data.Arrays."),
        ("metrics.accuracy", "Did you mean 'Accuracy'?"),
        ("augmnt", "Did you mean 'augment'?"),
        ("nothing_alike", "module 'onnx_convgrad' has no attribute 'nothing_alike'"),
    ],
)
def test_an_attribute_that_a_module_lacks(wrong: str, right: str) -> None:
    assert _missing(wrong).endswith(right)


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [
        (og.augment, {"input_shapes": {}}, "'input_shapes'. Use og.load(model, input_shapes=...) as the model."),
        (og.augment, {"seed": "ones"}, "Use cotangents='ones'."),
        (og.build_training, {"memory_budget": 0.5}, "Use memory=0.5, or memory=og.Memory(budget=...)."),
        (
            og.build_training,
            {"schedule": "cosine"},
            "Use optimizer=og.optim.SGD(og.schedules.Cosine(0.1, steps=1000)).",
        ),
        (og.attacks.pgd, {"eps": 0.1}, "unexpected keyword argument 'eps'. Use epsilon=0.03."),
        (og.load, {"shapes": {}}, "Did you mean 'states', 'input_shapes'?"),
        (og.load, {"seed": 0}, "It takes model, input_shapes, input_values, states, limits, base_dir."),
    ],
)
def test_a_keyword_that_a_function_lacks(function: Any, wrong: dict[str, Any], right: str) -> None:
    with pytest.raises(TypeError) as caught:
        function("model.onnx", **wrong)
    assert f"{caught.value}".endswith(right)


def test_arguments_that_go_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"augment: too many positional arguments\. Give all but model by name: wrt=, of="
    ):
        og.augment("model.onnx", "inputs")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("augment m.onnx --output x", "No such option: --output. Use --out or --of. See"),
        ("check m.onnx --samples 4", "No such option: --samples. Use --directions. See"),
        ("map m.onnx --samples 4", "No such option: --samples. Use --samples-per-file. See"),
        ("saliency m.onnx", "No such command 'saliency'. Use attribute. See"),
    ],
)
def test_an_option_or_a_command_that_is_unknown(words: str, message: str) -> None:
    command = [sys.executable, "-m", "onnx_convgrad", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_names_to_use_exist() -> None:
    for place in ATTRIBUTES.values():
        pkgutil.resolve_name(f"onnx_convgrad.{place}")
    taken = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert {parameter for parameter, _ in KEYWORDS.values()} <= taken
    options = {option for command in COMMANDS.values() for p in command.params for option in p.opts}
    assert {word for words in WORDS.values() for word in words.split()} <= options | set(COMMANDS)


@pytest.mark.parametrize("module", [name for name in PUBLIC.split() if name != "functional"])
def test_members_are_read_without_an_import(module: str) -> None:
    assert _members(module) == list(getattr(og, module).__all__)
