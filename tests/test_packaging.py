"""The contents of the wheel, its metadata, and imports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import onnx_convgrad
from onnx_convgrad import lowering, rules

pytestmark = pytest.mark.slow

SLOW_TO_IMPORT = set("numpy onnx onnx_ir onnx_shape_inference onnxruntime onnxscript rich sympy torch".split())
KINDS = """
from pathlib import Path

import onnx
import onnx_ir as ir

from_path: onnx.ModelProto = og.vjp(Path("x.onnx"), wrt="inputs", target="cuda")
from_proto: onnx.ModelProto = og.jvp(model, wrt=["x"], target=og.Target("cuda", deterministic=True))
from_ir: ir.Model = og.hvp(ir.load("x.onnx"), wrt="x", of="loss")
og.transforms.lower_gradient_ops(model, training=True)  # type: ignore[call-overload]
"""
"""The result has the kind of the model, and unknown keywords are errors."""

INFO = f"onnx_convgrad-{onnx_convgrad.__version__}.dist-info"


def _python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def _modules(root: Path) -> set[str]:
    """The path in a wheel of every module of the tree."""
    package = {p.relative_to(root).as_posix() for p in (root / "onnx_convgrad").rglob("*.py")}
    shipped = {f"onnx_convgrad/{p.relative_to(root).as_posix()}" for p in (root / "rules").rglob("*.py")}
    return package | shipped


# -- the wheel ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tree", "sdist"])
def wheel(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the tree or from the source distribution, with the installed tools."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "source"
    # A copy: a build leaves folders behind, and packages modules that it finds in them.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for name in ("onnx_convgrad", "rules", "tests"):
        shutil.copytree(root / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--wheel"] if request.param == "tree" else []
    done = _python("-m", "build", "--no-isolation", *options, "--outdir", folder / "dist", source)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_string(wheel.read(f"{INFO}/METADATA").decode())


def test_contents_of_the_wheel(wheel: zipfile.ZipFile, root: Path) -> None:
    names = wheel.namelist()
    assert len(names) == len(set(names))
    shipped = {n for n in names if ".dist-info/" not in n}
    site = {p.relative_to(root).as_posix() for p in (root / "onnx_convgrad" / "cli" / "site").iterdir()}
    assert shipped == _modules(root) | {"onnx_convgrad/py.typed", "onnx_convgrad/cli/view.html"} | site
    assert wheel.read(f"{INFO}/licenses/LICENSE") == (root / "LICENSE").read_bytes()
    entry_points = wheel.read(f"{INFO}/entry_points.txt").decode()
    assert "[console_scripts]\nonnx-convgrad = onnx_convgrad.cli.app:main\n" in entry_points


@pytest.mark.parametrize("wheel", ["tree"], indirect=True)
def test_a_second_build_gives_the_same_bytes(wheel: zipfile.ZipFile, root: Path, tmp_path: Path) -> None:
    first = Path(str(wheel.filename)).parent
    done = _python("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, first.parent / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = tmp_path.glob("*.whl")
    assert again.read_bytes() == (first / again.name).read_bytes()


def test_wheel_imports_by_itself(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import onnx_convgrad.rules.conv as conv, onnx_convgrad.autodiff.registry as registry\n"
        "assert any(rule.op_type == 'Conv' for rule in registry.rules())\n"
        "print(conv.__file__)"
    )
    done = _python("-I", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "onnx_convgrad" / "rules" / "conv.py"


def test_an_editable_install_is_a_plain_path(root: Path, tmp_path: Path) -> None:
    """Type checkers follow it; they do not run the import hooks that other layouts need."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
    shutil.copytree(root, source, symlinks=True, ignore=ignored)
    program = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = _python("-c", program, cwd=source)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as editable:
        (link,) = (name for name in editable.namelist() if ".dist-info/" not in name)
        assert editable.read(link).decode().split() == [str(source)]


def test_the_readme_type_checks(root: Path, tmp_path: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (tmp_path / "first.py").write_text(blocks[0] + KINDS, encoding="utf-8")
    # With the settings and the cache of the command `mypy`, which checks what the file imports.
    done = _python("-m", "mypy", "--strict", tmp_path / "first.py", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "onnx-convgrad"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier", [])
    assert "Development Status :: 5 - Production/Stable" in classifiers
    supported = {c.rpartition(" ")[2] for c in classifiers if "Python :: 3." in c}
    assert supported == {"3.11", "3.12", "3.13"}, "name the versions that the tests have run under"
    assert metadata.get_all("Project-URL") is None, "the package has no address yet"
    extras = set(metadata.get_all("Provides-Extra", []))
    loggers = {"mlflow", "tensorboard", "wandb"}
    assert extras == {
        "cpu",
        "cuda",
        "detection",
        "docs",
        "examples",
        "flower",
        "mpi",
        "onnxscript",
        "plot",
        "privacy",
        "test",
        "texts",
        "train",
        *loggers,
    }


def test_the_runtime_is_an_extra(metadata: Message) -> None:
    required = [Requirement(r) for r in metadata.get_all("Requires-Dist", [])]
    always = {r.name for r in required if r.marker is None}
    assert always == {"numpy", "onnx", "onnx-ir", "onnx-shape-inference", "platformdirs", "rich", "typer"}
    for extra, runtime, options in (("cpu", "onnxruntime", set()), ("cuda", "onnxruntime-gpu", {"cuda", "cudnn"})):
        (found,) = (r for r in required if r.marker is not None and r.marker.evaluate({"extra": extra}))
        assert (found.name, found.extras) == (runtime, options)


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_young_packages_are_bounded_and_the_installed_ones_are_within(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [Requirement(text) for text in project["dependencies"]]
    assert {r.name for r in required if any(s.operator == "<" for s in r.specifier)} == {
        "onnx-ir",
        "onnx-shape-inference",
    }
    for requirement in required:
        assert requirement.specifier.contains(version(requirement.name)), "CONTRIBUTING.md says how a bound is raised"


def test_rules_is_a_relative_link(root: Path) -> None:
    link = root / "onnx_convgrad" / "rules"
    assert link.is_symlink()
    assert link.readlink() == Path("../rules")


def test_every_rule_module_is_listed(root: Path) -> None:
    files = {path.stem for path in (root / "rules").glob("*.py")} - {"__init__"}
    assert len(rules.MODULES) == len(set(rules.MODULES))
    assert set(rules.MODULES) == files, "bring MODULES in rules/__init__.py up to date"


DECLARES = re.compile(r"^ *(@lowering|@spec_builder|@both_ways|declare)\(", re.MULTILINE)
"""The declarations of lowerings in a module, or of the geometry that they read off a node."""


def _declaring(folder: Path) -> set[str]:
    return {p.stem for p in folder.glob("*.py") if DECLARES.search(p.read_text(encoding="utf-8"))}


def test_every_module_with_lowerings_is_listed(root: Path) -> None:
    folder = root / "onnx_convgrad" / "lowering"
    assert set(lowering.MODULES) == {
        f"{kind}.{name}" for kind in ("conv", "pool") for name in _declaring(folder / kind)
    }


PASSES = re.compile(r"^class \w+\((GraphPass|NodePass)", re.MULTILINE)


def _mirrored(root: Path) -> set[str]:
    """Every rule module, module of a pass and module of lowerings, by folder."""
    package = root / "onnx_convgrad"
    modules = {f"rules/{name}" for name in rules.MODULES}
    for folder in ("backends", "backends/cpu", "backends/cuda", "memory", "frontend", "pipeline"):
        files = (package / folder).rglob("*.py") if folder == "frontend" else (package / folder).glob("*.py")
        modules |= {
            p.relative_to(package).with_suffix("").as_posix() for p in files if PASSES.search(p.read_text("utf-8"))
        }
    return modules | {f"lowering/{name.replace('.', '/')}" for name in lowering.MODULES}


def test_every_rule_pass_and_lowering_has_a_test_file_of_its_name(root: Path) -> None:
    files = {name: "tests/{}/test_{}.py".format(*name.rsplit("/", 1)) for name in _mirrored(root)}
    assert len(files) > 60
    assert not [file for file in files.values() if not (root / file).exists()]


def test_rules_cannot_be_imported_by_another_name(root: Path) -> None:
    done = _python("-c", "import rules", cwd=root)
    assert done.returncode != 0
    assert "import this package as onnx_convgrad.rules, not as rules" in done.stderr


def test_versions_agree(metadata: Message, root: Path) -> None:
    assert metadata["Version"] == onnx_convgrad.__version__
    assert f"## [{onnx_convgrad.__version__}]" in (root / "CHANGELOG.md").read_text()


def test_ci_runs_the_commands_of_the_readme(root: Path) -> None:
    commands = re.findall(r"^readme_\w*='?(.*?)'?$", (root / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(commands) == 2
    readme = (root / "README.md").read_text().splitlines()
    for command in commands:
        assert command in readme, f"README.md should have the line: {command}"


# -- imports -----------------------------------------------------------------------------------------------------------


def _run_main(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that prints its loaded modules as JSON on the last line."""
    program = (
        "import json, runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({without!r}))\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "try:\n"
        "    runpy.run_module('onnx_convgrad', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    print(json.dumps(sorted(name for name, module in sys.modules.items() if module)))"
    )
    return _python("-c", program)


@pytest.mark.parametrize("arguments", [("--help",), ("augment", "--help")], ids=" ".join)
def test_help_imports_nothing_slow(arguments: tuple[str, ...]) -> None:
    done = _run_main(*arguments)
    assert done.returncode == 0, done.stderr
    assert "augment" in done.stdout
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "onnx_convgrad.cli.app" in loaded
    assert loaded & SLOW_TO_IMPORT == set()


def test_importing_the_package_imports_nothing_slow() -> None:
    done = _python("-c", "import json, sys, onnx_convgrad; print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) & SLOW_TO_IMPORT == set()


def test_every_public_name_resolves() -> None:
    libraries = {name for name in ("jax", "torch") if find_spec(name) is None}  # modules that need them say so
    names = set(onnx_convgrad.__all__) - libraries
    assert [name for name in names if getattr(onnx_convgrad, name, None) is None] == []


def test_without_a_runtime_the_error_says_how_to_install_one(digits_cnn: Path) -> None:
    done = _run_main("check", str(digits_cnn), without=("onnxruntime",))
    assert done.returncode == 2
    # The terminal library breaks lines, and could take [cuda] for markup.
    text = " ".join(done.stderr.split())
    assert "`python -m pip install onnxruntime`" in text
    assert '`python -m pip install "onnxruntime-gpu[cuda,cudnn]"`' in text
    assert "Traceback" not in text


def test_gradients_can_be_built_without_a_runtime(digits_cnn: Path, tmp_path: Path) -> None:
    """Only running a model needs ONNX Runtime, so a build machine may lack it."""
    done = _run_main("augment", str(digits_cnn), "-o", str(tmp_path / "grad.onnx"), without=("onnxruntime",))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "grad.onnx").exists()
