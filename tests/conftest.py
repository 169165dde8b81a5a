"""Fixtures and settings of all tests: reproducible hypothesis runs, one thread per library, paths, skipped tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnxruntime
import pytest
from hypothesis import settings

from tests.support.runtime_faults import faults

# The networks here are far too small to gain from threads, and the workers of pytest-xdist compete for the cores.
# Libraries read these when they are loaded, so they are set before any test module is.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


class _OneThread(onnxruntime.SessionOptions):  # type: ignore[misc]  # ONNX Runtime reads none of these variables
    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1


onnxruntime.SessionOptions = _OneThread

# Measurements of `bench --calibrate` on this machine must not influence tests.
os.environ["ONNX_CONVGRAD_CACHE"] = ""

# Every run draws equal examples, so that a change never fails for an older bug. `explore` draws new ones.
settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder for networks that are exported once; the workers of pytest-xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="onnx_convgrad-")
        os.environ["ONNX_CONVGRAD_TEST_EXPORTS"] = folder.name
        config.add_cleanup(folder.cleanup)


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def digits_cnn(root: Path) -> Path:
    """The small CNN of the README's first command."""
    return root / "examples" / "models" / "digits_cnn.onnx"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without ONNX Runtime's CUDA provider, and tests that an older ONNX Runtime cannot pass."""
    _skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])
    from onnx_convgrad.runtime import import_runtime

    for test, reason in faults(import_runtime().__version__):
        for item in items:
            if test.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    from onnx_convgrad.errors import ExecutionError
    from onnx_convgrad.runtime import import_runtime
    from onnx_convgrad.runtime.providers import CUDA, check_available

    try:
        check_available(import_runtime(), [CUDA])
    except ExecutionError as problem:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=problem.message))


@pytest.fixture
def hasty_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all measurements, for tests that do not read times."""
    from onnx_convgrad.bench import timing

    for name, value in {"_PAUSE": 0.0, "_PATIENCE": 0.0, "_SHORTEST": 1e-5}.items():
        monkeypatch.setattr(timing, name, value)
