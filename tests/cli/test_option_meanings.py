"""One option name has one meaning in all commands, and messages name options that there are."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import typer.main

from onnx_convgrad.cli.app import app
from tests.support.command_line import invoke, stored

TWO_MEANINGS = {
    "--of": "chooses tensors of the model everywhere: those that are differentiated, or the one that is read",
}
"""Name of an option -> why its texts differ."""


def options() -> list[tuple[str, Any]]:
    """Command and parameter of every option."""
    group: Any = typer.main.get_command(app)
    found = ((name, one) for name, command in group.commands.items() for one in command.params)
    return [(name, one) for name, one in found if one.param_type_name == "option"]


def meaning(one: Any) -> tuple[Any, ...]:
    """The names of an option, its values, and the start of its help, which details and a default of the command follow."""
    kind = one.bare_type() if one.bare_type() in (bool, int, float) else str  # a path is text, and so are several names
    text = re.split(r"[.:]( |$)| \[default", one.help)[0]
    return tuple(one.opts), tuple(one.secondary_opts), kind, (one.metavar or "").removesuffix("S"), text


def test_an_option_has_one_meaning_in_all_commands() -> None:
    meanings: dict[str, dict[tuple[Any, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, one in options():
        for name in (*one.opts, *one.secondary_opts):
            meanings[name][meaning(one)].append(command)
    several = {name: dict(found) for name, found in meanings.items() if len(found) > 1}
    wrong = {name: found for name, found in several.items() if name not in TWO_MEANINGS}
    assert not wrong, f"share the text, in cli/shared_options.py, or choose another name: {wrong}"
    assert several.keys() == TWO_MEANINGS.keys()


def test_what_is_written_is_named_by_out_and_a_tensor_by_of() -> None:
    names = {command: set() for command, _ in options()}
    for command, one in options():
        names[command].update(one.opts)
        assert ("-o" in one.opts) == ("--out" in one.opts) == (one.opts[-1] == "--out")
    writing = {"augment", "view", "lower", "train", "predict", "evaluate", "quantize", "attribute", "web", "map"}
    assert {command for command, found in names.items() if "--out" in found} == writing
    reading = {"augment", "explain", "view", "check", "bench", "predict", "evaluate", "attribute", "map"}
    assert {command for command, found in names.items() if "--of" in found} == reading
    assert not any("--output" in found for found in names.values())


def test_defaults_are_named_once() -> None:
    for command, one in options():
        shown = one.show_default and one.default not in (None, False)
        assert one.help.count("[default") + shown <= 1, (command, one.opts)
        assert "  " not in one.help and one.help.rstrip("]").strip(), (command, one.opts)


OF_OTHERS = {"--help", "--nproc-per-node"}
"""Options of every command, and of torchrun."""


def test_texts_name_options_that_there_are() -> None:
    """Docstrings, help and messages."""
    known = {name for _, one in options() for name in (*one.opts, *one.secondary_opts)} | OF_OTHERS
    root = Path(__file__).parents[2]
    for path in sorted([*(root / "onnx_convgrad").rglob("*.py"), *(root / "rules").rglob("*.py")]):
        if path.name == "other_names.py":  # names that are not, each with the one that is
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = {name for text in texts for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
        assert named <= known | {"--version"}, path


OVERRIDES = {"--lowering"}
"""Options of which a later value replaces an earlier one, as their help says."""


def test_no_option_takes_the_last_of_two_values_in_silence(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3, 8, 8), np.float32), target=np.zeros(4, np.int64))
    model, data = stored(tmp_path), f"{tmp_path / 'd.npz'}"
    named = {one.opts[-1] for command, one in options() if command == "train" and "=" in (one.metavar or "")}
    values = {"--data": f"a={data}", "--validation": f"a={data}", "--loss": "y=mse"}
    for name in sorted(named - OVERRIDES):
        given = [] if name == "--data" else ["--data", data]
        given += [] if name == "--loss" else ["--loss", "mse"]
        twice = [name, values.get(name, "x=1")] * 2
        result = invoke("train", model, *given, *twice, status=2)
        assert re.search("twice|more than one", result.output), f"{name}: {result.output}"
