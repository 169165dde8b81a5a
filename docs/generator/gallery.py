"""The gallery: every example with its program, its output and its picture, made by running it."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
IMAGES = ROOT / "docs" / "images"
GROUPS = {
    "Understand a network": (
        "explain_photographs", "explain_pictures", "compare_explanations", "attack_digits", "certify_digits",
        "jacobian_of_digits", "feature_visualization", "find_wrong_labels", "loss_landscape", "gradient_penalty",
    ),
    "Train": (
        "train_digits", "fine_tune_last_block", "low_rank_adapter", "distill_network", "segment_unet", "detect_shapes",
        "adapt_language_model", "fine_tune_embeddings", "fine_tune_yolo", "fine_tune_vad", "fine_tune_wake_word",
        "fine_tune_piper", "denoise_digits",
        "quantize_digits", "forecast_with_lstm", "find_learning_rate", "optimizers_compared",
    ),
    "Train in other ways": (
        "gan_digits", "balance_pole", "private_digits", "dp_sgd", "federated", "test_time_adaptation", "fine_tune_by_hand",
        "layer_in_pytorch",
    ),
    "Optimize pictures": ("deblur_photograph", "align_images", "neural_field"),
    "Science": (
        "physics_informed", "particle_forces", "force_matching", "aim_a_throw", "swing_up",
        "sample_density", "gauss_newton",
    ),
    "Extend": ("custom_operator", "own_pipeline"),
}  # fmt: skip
"""Heading -> names of examples; all others are under "More"."""

LEFT_OUT = {"hifigan", "make_digits_cnn", "networks", "shapes"}
"""A program that writes a committed file, and modules that other examples import."""

ONE_THREAD = Path(__file__).parent / "one_thread.py"
"""The program that runs an example."""

_PRINTED = "printed.txt"
_LIMIT = 1200
"""Most seconds of one example."""

_NAMED = re.compile(r"^ *(?:import|from) (\w+)|\"(\w+\.onnx)\"", re.MULTILINE)
"""An imported module, or a model."""


@dataclass(frozen=True)
class Example:
    """A program, and what it printed and drew.

    Attributes:
        path: The program.
        printed: Its output; `None` if a package that it needs is not installed.
        pictures: The pictures that it wrote, or else its picture in `docs/images`.
    """

    path: Path
    printed: str | None
    pictures: tuple[Path, ...]

    @property
    def title(self) -> str:
        return self.path.stem.replace("_", " ").capitalize()

    @property
    def about(self) -> str:
        """The docstring, without the lines that say how to run the program."""
        text = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        kept = [paragraph for paragraph in text.split("\n\n") if not paragraph.startswith("python examples/")]
        return "\n\n".join(kept)


def names() -> list[str]:
    """The examples of the gallery, in its order."""
    there = {path.stem for path in EXAMPLES.glob("*.py")} - LEFT_OUT
    listed = [name for group in GROUPS.values() for name in group]
    return [*listed, *sorted(there - {*listed})]


def write(folder: Path, only: str | None = None) -> None:
    """Write the pages of the examples; those without a kept result are run, as many at a time as there are processors.

    Args:
        folder: The folder of the pages.
        only: The only example whose page is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = names() if only is None else [only]
    programs, results = [*map(_program, written)], [*map(kept, written)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        examples = dict(zip(written, pool.map(_run, programs, results), strict=True))
    for name, example in examples.items():
        for picture in example.pictures:
            shutil.copy(picture, folder)
        (folder / f"{name}.md").write_text(_page(example), encoding="utf-8")
    if only is None:
        (folder / "index.md").write_text(_index(examples), encoding="utf-8")


def _program(name: str) -> Path:
    return EXAMPLES / f"{name}.py"


def kept(name: str) -> Path:
    """The folder of an example's result, which serves until the example, a file that it uses or the package changes."""
    digest = hashlib.sha256(_package().encode())
    for path in _used(_program(name)):
        digest.update(f"{path.relative_to(EXAMPLES)}\n".encode() + path.read_bytes())
    return ROOT / ".cache" / "gallery" / f"{name}-{digest.hexdigest()[:12]}"


def keep(folder: Path, printed: str, place: Path) -> None:
    """Keep what an example printed and the pictures that it wrote into `place`, instead of its earlier result."""
    name, dash, _ = folder.name.rpartition("-")
    for earlier in folder.parent.glob(f"{name}{dash}*" if dash else folder.name):
        shutil.rmtree(earlier, ignore_errors=True)
    folder.mkdir(parents=True)
    for picture in place.glob("*.png"):
        shutil.copy(picture, folder)
    (folder / _PRINTED).write_text(printed, encoding="utf-8")


def _used(program: Path) -> list[Path]:
    """A program, and the modules and models of `examples/` that it or one of these names."""
    there = {path.stem if path.suffix == ".py" else path.name: path for path in sorted(EXAMPLES.rglob("*.*"))}
    used, left = {program}, [program]
    while left:
        path = left.pop()
        text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
        found = {there[name] for name in map("".join, _NAMED.findall(text)) if name in there} - used
        used |= found
        left += found
    return sorted(used)


@cache
def _package() -> str:
    """A hash of the package without its docstrings, on which no result depends."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "onnx_convgrad").rglob("*.py"), *(ROOT / "rules").glob("*.py")]):
        digest.update(_code(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def _code(text: str) -> str:
    """The lines of a module without docstrings and empty lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(filter(None, lines))


_MISSING = re.compile(r"ModuleNotFoundError|PackageNotFoundError|, which is not installed\.")
"""Errors of an example that lacks a package."""


def _run(path: Path, folder: Path) -> Example:
    """Run an example, or take the result of an earlier run from `folder`.

    Raises:
        SystemExit: The example fails.
    """
    printed = folder / _PRINTED
    if not printed.exists():
        print(f"running {path.name}", flush=True)
        with tempfile.TemporaryDirectory() as place:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg"}
            done = subprocess.run(
                [sys.executable, str(ONE_THREAD), str(path)],
                capture_output=True,
                text=True,
                check=False,
                cwd=place,
                env=environment,
                timeout=_LIMIT,
            )
            if _MISSING.search(done.stderr):
                print(f"{path.name} is shown without a result: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return Example(path, None, tuple(IMAGES.glob(f"{path.stem}.png")))
            if done.returncode:
                raise SystemExit(f"{path.name} failed:\n{done.stderr}")
            keep(folder, done.stdout, Path(place))
    return Example(path, printed.read_text(encoding="utf-8"), tuple(sorted(folder.glob("*.png"))))


def _page(example: Example) -> str:
    lines = [f"# {example.title}", "", example.about, ""]
    lines += [f"![What {example.path.name} draws]({picture.name})\n" for picture in example.pictures]
    if example.printed:
        lines += ["It prints:", "", "```text", example.printed.rstrip(), "```", ""]
    program = example.path.read_text(encoding="utf-8").rstrip()
    lines += [f"The program, `examples/{example.path.name}`:", "", "```python", program, "```", ""]
    return "\n".join(lines)


def _index(found: dict[str, Example]) -> str:
    """The first page: a card for each example, by group."""
    listed = {name for group in GROUPS.values() for name in group}
    groups = {**GROUPS, "More": tuple(name for name in found if name not in listed)}
    lines = ["# Gallery", "", f"{len(found)} programs of less than 80 lines, each with what it prints and draws.", ""]
    for heading, members in groups.items():
        if members:
            lines += [f"## {heading}", "", '<div class="grid cards" markdown>', ""]
            for name in members:
                lines += _card(found[name])
            lines += ["</div>", ""]
    return "\n".join(lines)


def _card(example: Example) -> list[str]:
    page, first = f"{example.path.stem}.md", example.about.partition("\n\n")[0].replace("\n", " ")
    picture = [f"    [![]({example.pictures[0].name})]({page})", ""] if example.pictures else []
    return [f"-   **[{example.title}]({page})**", "", *picture, f"    {first}", ""]
