"""Packages that are not always there: the error says what needs them, why they are missing, and how to install them."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import onnx_convgrad as og
from onnx_convgrad.base import optional
from onnx_convgrad.base.optional import PACKAGES, imported, install

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = {"json": "json", "plots_": "plots_[all] more", "colorsys": "colorsys", "lacking": "lacking"}
    monkeypatch.setattr(optional, "PACKAGES", PACKAGES | made_up)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported("json.decoder", "This needs json") is sys.modules["json.decoder"]
    with pytest.raises(og.errors.ExecutionError, match="Plots need plots_, which is not installed") as caught:
        imported("plots_.lines", "Plots need plots_")
    assert caught.value.hint == 'Install it with `python -m pip install "plots_[all]" more`.'
    monkeypatch.setitem(sys.modules, "colorsys", None)
    with pytest.raises(og.errors.ExecutionError, match="which is not installed") as caught:
        imported("colorsys", "This needs colorsys", "use gray")
    assert caught.value.hint == "Install it with `python -m pip install colorsys`, or use gray."


def test_a_package_that_lacks_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import another_package_\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(og.errors.ExecutionError, match="which cannot be imported: No module named 'another_package_'"):
        imported("lacking", "This needs lacking")


# -- remedies ----------------------------------------------------------------------------------------------------------


def declared() -> dict[str, set[str]]:
    """Package -> its options, of all extras; and those that results are compared with."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    peers = (ROOT / "tests" / "peers.txt").read_text(encoding="utf-8").splitlines()
    texts = [*(text for extra in extras.values() for text in extra), *(p for p in peers if not p.startswith("#"))]
    return {required.name: required.extras for required in map(Requirement, texts)}


def words_of(command: str) -> list[str]:
    """The packages that a command of `install` names, as a shell passes them on."""
    start, words = command.strip("`").split()[:4], shlex.split(command.strip("`"))
    assert start == ["python", "-m", "pip", "install"]
    return words[4:]


@pytest.mark.parametrize("module", PACKAGES)
def test_what_is_to_be_installed_is_declared(module: str) -> None:
    known = declared()
    for word in words_of(install(module)):
        required = Requirement(word)
        assert required.extras == known[required.name], "an extra of pyproject.toml, or tests/peers.txt, should have it"
        assert required.name != "onnx-convgrad"


def test_shells_do_not_expand_commands() -> None:
    """Words with brackets are globs for zsh, which refuses those that match no file."""
    for command in map(install, PACKAGES):
        bare = re.sub(r'"[^"]*"', "", command.strip("`"))
        assert not set("[]*?<>!") & set(bare), command


def sources() -> Iterator[tuple[str, str]]:
    """File and text of all modules, but the one that has the table."""
    for folder in ("onnx_convgrad", "rules"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != ROOT / "onnx_convgrad" / "base" / "optional.py" and not path.parent.is_symlink():
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_only_the_table_says_how_packages_are_installed() -> None:
    """No index has the package itself, so pip finds its extras only in a copy of the repository."""
    for file, text in sources():
        assert "onnx-convgrad[" not in text, file
        assert not re.search(r"pip install(?! --upgrade)", text), f"{file}: use base.optional.install"


def test_every_module_that_is_asked_for_is_in_the_table() -> None:
    asked = {name for _, text in sources() for name in re.findall(r"""(?:imported|install)\(\s*f?["']([\w-]+)""", text)}
    assert {"onnxruntime", "onnxruntime-gpu", "flwr", "safetensors", "matplotlib"} <= asked <= PACKAGES.keys()
