"""Text of files reaches a terminal only with escapes, whichever command prints it, and whatever the text."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.errors import shown
from tests.support import every_command

CLIPBOARD, CLEAR, LINK, TITLE = "\x1b]52;c;eA==\x07", "\x1b[2J\x1b[H", "\x1b]8;;http://x\x1b\\", "\x1b]0;t\x07"
EVIL = f"{CLIPBOARD}{CLEAR}[red]\nForged\rForged\x85Forged\u2028Forged\u202e\x9b2J\x7f\u200b\ue000$\\frac$"
"""A hostile name: commands of a terminal, markup of rich, line ends, marks of direction, half a formula."""


def evil(name: str) -> str:
    return f"{name}{EVIL}{name}"


ALL = [(0, line.split()) for line in every_command.LINES.values()]
SOME = [
    (0, every_command.LINES["inspect"].split()),
    (0, every_command.LINES["explain"].split()),
    (0, ["augment", "model.onnx", "--wrt", "inputs", "--json"]),
    (2, ["augment", "invalid.onnx"]),
    (2, ["inspect", evil("missing")]),
    (2, ["augment", "model.onnx", "--wrt", "nothing"]),
    (2, ["augment", "model.onnx", "--wrt", evil("nothing")]),
    (2, ["augment", "model.onnx", evil("more")]),
    (2, ["augment", "model.onnx", evil("--option")]),
    (3, ["augment", "unknown.onnx", "--wrt", "all"]),
    (2, ["train", "model.onnx", "--config", "unknown.toml"]),
    (2, ["train", "model.onnx", "--config", "invalid.toml"]),
    (2, ["train", "--resume", "damaged"]),
    (2, ["predict", "model.onnx", "table.csv"]),
    (2, ["predict", "model.onnx", evil("missing.png")]),
    (2, ["predict", "metadata.onnx", "picture.png"]),
    (0, ["predict", "model.onnx", "picture.png", "--labels", "labels.txt"]),
    (2, ["evaluate", "model.onnx", "other"]),
    (2, ["augment", "external.onnx"]),
]
"""Status and words of command lines."""

MORE = [(0, ["explain", "run/program"])]  # made by `train`

PROGRAM = """
import json, sys
from onnx_convgrad.cli.app import main
found = []
for _, words in json.load(open("lines.json")):
    print("##", words[0], flush=True)
    try:
        main(words)
    except SystemExit as end:
        found.append(end.code)
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    every_command.furnish(tmp_path, evil)
    model = onnx.load(tmp_path / "model.onnx")
    model.graph.node[1].op_type, model.graph.node[1].domain = evil("Op"), evil("domain")
    model.opset_import.add(domain=evil("domain"), version=1)
    onnx.save(model, tmp_path / "unknown.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    next(p for p in model.metadata_props if p.key.endswith("preprocessing")).value = json.dumps({"fit": evil("fit")})
    onnx.save(model, tmp_path / "metadata.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], evil("weights"))
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    onnx.save(model, tmp_path / "external.onnx")
    (tmp_path / "unknown.toml").write_text(f"{json.dumps(EVIL)} = 1\n", encoding="utf-8")
    (tmp_path / "invalid.toml").write_text(f"epochs = {EVIL}\n", encoding="utf-8")
    (tmp_path / "table.csv").write_text(f'"{evil("x")}.png",text\n', encoding="utf-8", newline="")
    (tmp_path / "labels.txt").write_text("\x1b]0;t\x07a\x9b\n\u202eb\n", encoding="utf-8")
    (tmp_path / "other" / evil("unknown")).mkdir(parents=True)
    shutil.copy(tmp_path / "picture.png", tmp_path / "other" / evil("unknown"))
    (tmp_path / "damaged" / "program").mkdir(parents=True)
    (tmp_path / "damaged" / "train.toml").write_text("loss = ['mse']\n", encoding="utf-8")
    (tmp_path / "damaged" / "program" / "manifest.json").write_text(json.dumps({EVIL: EVIL}), encoding="utf-8")
    return tmp_path


def printed(folder: Path, lines: list[tuple[int, list[str]]], *, terminal: bool) -> str:
    """Run command lines in one process, with a terminal or a pipe, and return their output."""
    (folder / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "FORCE_COLOR": "", "PYTHONUTF8": "1"}
    if not terminal:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, cwd=folder, env=environment
        )
        return done.stdout.decode()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment):
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 2**16):
                parts.append(part)
        except OSError:  # the end, on Linux
            pass
    os.close(ours)
    return b"".join(parts).decode()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("lines", [SOME, pytest.param([*ALL, *MORE], marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_text_of_a_file_commands_a_terminal(
    folder: Path, lines: list[tuple[int, list[str]]], terminal: bool
) -> None:
    text = printed(folder, lines, terminal=terminal)
    statuses = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert statuses == [status for status, _ in lines], [*zip(lines, statuses, strict=True)]
    assert text.count("\\x1b]52;") > 50 and "[red]" in text  # the names are there
    assert "\rForged" not in text
    if (
        terminal
    ):  # what rich itself writes: styles, the cursor and the line of a spinner; and the line ends of terminals
        text = re.sub(r"\x1b\[(\d+(;\d+)*m|\?25[lh]|1?A|2K)|\r", "", text)
    wrong = {c for c in text if unicodedata.category(c)[0] == "C" or unicodedata.category(c) in ("Zl", "Zp")}
    assert wrong <= {"\n"}
    assert not re.search(r"^Forged", text, re.MULTILINE)


def test_errors_and_reports_are_safe_in_python_too(folder: Path) -> None:
    with pytest.raises(og.errors.ModelError) as caught:
        og.augment(folder / "invalid.onnx", wrt="inputs")
    texts = [f"{caught.value}", caught.value.message, caught.value.hint, str(og.explain(folder / "model.onnx"))]
    assert all(c.isprintable() or c in "\n " for text in texts for c in text)
    assert "Forged" not in {line.strip()[:6] for text in texts for line in text.splitlines()}


def test_a_page_shows_no_marks_of_direction(folder: Path) -> None:
    from tests.support.command_line import invoke

    invoke("view", folder / "model.onnx", "-o", folder / "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert (
        "\\\\x1b]52;" in page
        and not {"\u202e", "\x1b", "\u2028"} & set(page)
        and "\\u202e" not in page.replace("\\\\u202e", "")
    )


@pytest.mark.parametrize(
    "text", ["größe", "中文 標籤", "a  b", "naïve ñ é", "ελληνικά", "العربية", "👍 emoji", "a\u00a0b"]
)
def test_readable_text_stays(text: str) -> None:
    assert shown(text) == text


def test_every_character_that_is_not_to_be_read_is_escaped() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        kind = unicodedata.category(character)
        if kind[0] == "C" or kind in ("Zl", "Zp"):
            assert shown(character).isascii() and shown(character).isprintable()
        else:
            assert shown(character) == character
