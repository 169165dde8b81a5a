"""The site: every parameter of the API is described, every page is in the navigation, generated pages are complete."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import onnx_convgrad as og
from onnx_convgrad.autodiff.registry import rules
from onnx_convgrad.cli.app import app
from tests.test_tiers import MAY_CHANGE, TOOL_PACKAGES, package_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    """`docs/generate.py` as a module."""
    sys.path.insert(0, str(DOCS))
    yield import_module("generate")
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def pages(generate: ModuleType) -> dict[str, str]:
    return generate.reference()  # type: ignore[no-any-return]


def _listed(entries: list[Any]) -> list[str]:
    """The pages of a navigation, in order."""
    found = []
    for entry in entries:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            found += [value] if isinstance(value, str) else _listed(value)
    return found


def test_every_parameter_of_the_api_is_described(generate: ModuleType) -> None:
    missing = generate.api.undocumented()
    assert not missing, f"Describe them in the docstring, under Args: {', '.join(missing)}"


def test_the_navigation_has_every_page_once(generate: ModuleType, pages: dict[str, str]) -> None:
    listed = _listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    written = {path for path in written if path.partition("/")[0] not in generate.GENERATED}
    there = written | pages.keys() | {"gallery/index.md"}
    assert len(listed) == len(set(listed))
    assert there - {*listed} == set(), "Add these pages to the nav of mkdocs.yml."
    assert {*listed} - there == set(), "The nav of mkdocs.yml has pages that do not exist."


def test_the_reference_has_every_public_name(pages: dict[str, str]) -> None:
    functions = [name for name in set(og.__all__) - {"jax", "torch"} if callable(getattr(og, name))]
    assert [name for name in functions if not pages[f"reference/{name}.md"].startswith(f"# {name}\n")] == []


def test_the_reference_has_the_help_of_every_command(pages: dict[str, str]) -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"- [{name}](commands/{name}.md): " in pages["reference/commands.md"]
        text = pages[f"reference/commands/{name}.md"]
        for parameter in command.params:
            shown = (
                parameter.opts if parameter.opts[0].startswith("-") else [parameter.metavar or parameter.name.upper()]
            )
            assert [option for option in shown if option not in text] == [], f"{name} {parameter.name}"


def test_tables_have_every_argument(pages: dict[str, str]) -> None:
    sections = dict(part.split("\n", 1) for part in pages["reference/arguments.md"].split("\n### ")[1:])
    for function in (
        og.augment,
        og.vjp,
        og.grad,
        og.jvp,
        og.hvp,
        og.explain,
        og.build_training,
        og.Trainer,
        og.Trainer.fit,
    ):
        listed = sections[function.__qualname__]
        assert [n for n in inspect.signature(function).parameters if n != "self" and f"`{n}`" not in listed] == []


def test_tables_have_every_option(pages: dict[str, str]) -> None:
    sections = dict(part.split("\n", 1) for part in pages["reference/options.md"].split("\n## ")[1:])
    sections["train"] = pages["reference/train_options.md"]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = {p.opts[-1] for p in command.params if p.opts[-1].startswith("-")} - {
            "--json",
            "--quiet",
            "--help-all",
        }
        assert [option for option in options if f"`{option}" not in sections[name]] == [], name


def test_the_reference_says_of_a_tool_that_it_may_change(pages: dict[str, str]) -> None:
    listed = {path.removeprefix("reference/").removesuffix(".md"): text for path, text in pages.items()}
    tools = {name: text for name, text in listed.items() if package_of(name) in TOOL_PACKAGES}
    assert {"attacks", "attribution", "curvature", "federated.flower", "jax", "torch"} <= {*tools}
    assert [name for name, text in tools.items() if MAY_CHANGE not in text.split("\n## ")[0]] == []


def test_the_table_of_operators_has_every_rule(pages: dict[str, str]) -> None:
    text = pages["reference/operators.md"]
    names = [rule.name for rule in rules() if rule.domain != "convgrad"]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_index_of_the_reference_says_what_each_page_holds(pages: dict[str, str]) -> None:
    index = pages["reference/index.md"]
    assert "| [augment](augment.md) | Add the gradients of `of` with respect to `wrt` to a model;" in index
    assert "| [onnx_convgrad.optim](optim.md) | Optimizers of a training program" in index
    assert "| [Commands](commands.md) | " in index
    assert "|  |" not in index


def test_sections_of_a_long_file_move_to_pages_of_their_own(generate: ModuleType) -> None:
    text = "# Changes\n\nAll.\n\n## [1.1.0]\n\n- New.\n\n## [0.1.0]\n\n- Old.\n"
    divided = generate._divided("project/changelog.md", text)
    assert divided == {
        "project/changelog.md": "# Changes\n\nAll.\n\n- [Earlier changes](earlier_changes.md)\n\n## [1.1.0]\n\n- New.\n\n",
        "project/earlier_changes.md": "# Earlier changes\n\n\n## [0.1.0]\n\n- Old.\n",
    }


def test_the_gallery_has_every_example(generate: ModuleType) -> None:
    gallery = generate.gallery
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    listed = gallery.names()
    assert len(listed) == len(set(listed)) >= 25
    assert {*listed, *gallery.LEFT_OUT} == there


def test_a_page_of_the_gallery(generate: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "draw_a_line.py"
    program.write_text(
        '"""Draw a line.\n\npython examples/draw_a_line.py\n"""\nprint(1 + 1)\nopen("a.png", "w").close()\n'
    )
    for _ in range(2):  # the second time from the results of the first
        example = generate.gallery._run(program, tmp_path / "kept")
        assert example.printed == "2\n"
        assert [picture.name for picture in example.pictures] == ["a.png"]
        assert example.about == "Draw a line."
    page = generate.gallery._page(example)
    assert page.startswith("# Draw a line\n\nDraw a line.\n\n![")
    assert "```text\n2\n```" in page
    program.write_text("import no_such_module\n")
    assert generate.gallery._run(program, tmp_path / "other").printed is None
    program.write_text("1 / 0\n")
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        generate.gallery._run(program, tmp_path / "other")


@pytest.fixture
def gallery(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The gallery of a small repository: two examples, a module that one of them imports, a model, and a package."""
    files = {
        "examples/sum_up.py": "import networks\nprint(2)\n",
        "examples/read.py": 'from pathlib import Path\nMODEL = Path("models") / "digits.onnx"\n',
        "examples/networks.py": "import numpy as np\n",
        "examples/models/digits.onnx": "model",
        "onnx_convgrad/code.py": '"""Add."""\n\nx = 1\n"""One."""\n',
        "rules/add.py": "y = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(generate.gallery, "ROOT", tmp_path)
    monkeypatch.setattr(generate.gallery, "EXAMPLES", tmp_path / "examples")
    return generate.gallery  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("examples/sum_up.py", "import networks\nprint(3)\n", {"sum_up"}),
        ("examples/networks.py", "import numpy\n", {"sum_up"}),
        ("examples/models/digits.onnx", "another", {"read"}),
        ("onnx_convgrad/code.py", '"""Add\n\ntwo numbers."""\n\nx = 1\n"""Uno."""\n', set()),
        ("onnx_convgrad/code.py", '"""Add."""\n\nx = 2\n"""One."""\n', {"sum_up", "read"}),
        ("rules/add.py", "y = 3\n", {"sum_up", "read"}),
        ("README.md", "text", set()),
    ],
)
def test_the_result_of_an_example_serves_until_something_that_it_uses_changes(
    gallery: ModuleType, tmp_path: Path, file: str, text: str, changed: set[str]
) -> None:
    def results() -> dict[str, Path]:
        gallery._package.cache_clear()
        return {name: gallery.kept(name) for name in ("sum_up", "read")}

    before = results()
    (tmp_path / file).write_text(text)
    assert {name for name, folder in results().items() if folder != before[name]} == changed
    gallery._package.cache_clear()


def test_an_earlier_result_of_an_example_is_removed(gallery: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for name in ("add-0", "add_more-0", "add-1"):
        gallery.keep(folder / name, "2\n", tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["add-1", "add_more-0"]


def test_one_page_is_written_alone(generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def example(path: Path, _: Path) -> Any:
        return generate.gallery.Example(path, "2\n", ())

    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate.gallery, "_run", example)
    for asked, page in (("dp_sgd", "gallery/dp_sgd.md"), ("docs/project/security.md", "project/security.md")):
        assert generate.write_one(asked) == page
        assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")] == [page]
        (tmp_path / page).unlink()


def test_the_page_that_is_meant_is_found_or_named(generate: ModuleType) -> None:
    pages = ["reference/index.md", "reference/commands.md", "gallery/index.md"]
    assert generate._meant("commands", pages) == "reference/commands.md"
    assert generate._meant("gallery/index", pages) == "gallery/index.md"
    for asked, named in (("index.md", "reference/index.md, gallery/index.md"), ("command", "reference/commands.md")):
        with pytest.raises(SystemExit, match=f"not a generated page. Did you mean one of these\\? {named}$"):
            generate._meant(asked, pages)


def test_a_module_is_read_without_its_library(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    load = import_module("generator.load")
    for name in ("torch", "onnx_convgrad.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    module = load.load.__wrapped__("onnx_convgrad.torch")
    entry = generate.api.member("onnx_convgrad.torch.Module", module.Module)
    assert entry.parameters["wrt"][2].startswith("The parameters")
    assert not {"torch", "onnx_convgrad.torch"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("text", "parameters", "prose"),
    [
        ("Add.\n\nArgs:\n    x: First\n        part.\n    *more: More.\n", {"x": "First\npart.", "more": "More."}, "Add."),
        ("Tree.\n\n::\n\n    a\n    b\n\nEnd.", {}, "Tree.\n\n\n```text\na\nb\n```\n\nEnd."),
        ("Sum.\n\n>>> 1 + 1\n2\n", {}, "Sum.\n\n```pycon\n>>> 1 + 1\n2\n```"),
        ("List:\n- a\n- b", {}, "List:\n\n- a\n- b"),
        (None, {}, ""),
    ],
)  # fmt: skip
def test_docstrings_become_markdown(
    generate: ModuleType, text: str | None, parameters: dict[str, str], prose: str
) -> None:
    parsed = import_module("generator.docstrings").parse(text)
    assert parsed.parameters == parameters
    assert parsed.prose == prose
