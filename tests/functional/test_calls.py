"""`onnx_convgrad.functional` caches and shares compiled models, and reports their failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError, ConvGradError, ExecutionError
from onnx_convgrad.functional import plans, requests, sessions

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3, 3)).astype(np.float32)
G = np.random.default_rng(2).standard_normal((2, 4, 8)).astype(np.float32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The models compiled during the test, with empty caches."""
    models: list[bytes] = []
    original = sessions.session
    monkeypatch.setattr(
        sessions, "session", lambda model, **options: models.append(model) or original(model, **options)
    )
    plans.plan.cache_clear()
    sessions._open.clear()
    yield models
    plans.plan.cache_clear()
    sessions._open.clear()


def test_equal_meanings_are_compiled_once(made: list[bytes]) -> None:
    """Numbers, tuples, lists and "same"; another array of the same shape, or of the other byte order; no batch axis."""
    first = F.conv1d_weight(X, W.shape, G, padding=1)
    for padding in (1, (1,), [1], np.array([1]), np.array(1), "same", np.int64(1)):
        np.testing.assert_array_equal(F.conv1d_weight(X, list(W.shape), G, padding=padding), first)
    np.testing.assert_array_equal(F.conv1d_weight(2 * X, W.shape, G, 1, 1), 2 * first)
    assert len(made) == 1
    swapped = [a.astype(a.dtype.newbyteorder()) for a in (X, G)]
    np.testing.assert_array_equal(F.conv1d_weight(swapped[0], W.shape, swapped[1], 1, 1), first)
    assert len(made) == 1
    alone = F.conv1d_weight(X[0], W.shape, G[0], padding=1)
    np.testing.assert_array_equal(F.conv1d_weight(X[:1], W.shape, G[:1], padding=1), alone)
    assert len(made) == 2


def test_different_calls_are_compiled_separately(made: list[bytes]) -> None:
    """Dtype, mask, geometry, provider options and session options."""
    F.convolution_backward(G, X, W, None, 1, 1)
    F.convolution_backward(G, X, W, None, 1, 1, output_mask=(True, True, False))
    F.convolution_backward(G.astype(float), X.astype(float), W.astype(float), None, 1, 1)
    F.convolution_backward(G[..., :4], X, W, None, 2, 1)
    F.convolution_backward(G, X, W, None, 1, 1, providers=[("cpu", {"arena_extend_strategy": "kSameAsRequested"})])
    F.convolution_backward(G, X, W, None, 1, 1, options={"threads": 2})
    assert len(made) == len(set(made)) + 2 == 6  # options are not in the model
    F.convolution_backward(G, X, W, None, 1, 1, providers="cpu")
    F.convolution_backward(G, X, W, None, 1, 1, providers=["CPUExecutionProvider"], options={})
    assert len(made) == 6


def test_threads_that_miss_together_compile_once(made: list[bytes]) -> None:
    barrier = threading.Barrier(4)

    def call(_: int) -> np.ndarray:
        barrier.wait()
        return F.conv1d_input(X.shape, W, G, padding=1)

    with ThreadPoolExecutor(4) as workers:
        first, *others = workers.map(call, range(4))
    assert len(made) == 1
    for found in others:
        np.testing.assert_array_equal(found, first)


def test_the_caches_are_bounded() -> None:
    assert plans.plan.cache_info().maxsize == sessions.SESSIONS


def test_refused_arguments_are_not_cached(made: list[bytes]) -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match="negative padding"):
            F.conv1d_weight(X, W.shape, G, padding=-1)
    assert made == []
    assert plans.plan.cache_info().currsize == 0


def test_a_cached_call_does_not_admit_a_fraction(made: list[bytes]) -> None:
    F.conv1d_weight(X, W.shape, G, stride=[1], padding=1)
    with pytest.raises(ArgumentError, match="stride must be an integer"):
        F.conv1d_weight(X, W.shape, G, stride=[1.0], padding=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stride": {1}}, "neither a number"),
        ({"padding": bytearray(1)}, "neither a number"),
        ({"options": 3}, "options must be"),
        ({"options": {1: 2}}, "Unknown session option '1'"),
        ({"padding": {1: 2, "a": 3}}, "padding, of type dict, cannot be read"),
    ],
)
def test_arguments_of_another_kind(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        F.conv1d_weight(X, W.shape, G, **{"padding": 1, **arguments})
    with pytest.raises(ArgumentError, match="transposed must be"):
        F.convolution_backward(G, X, W, transposed=np.array([0]))


def test_results_belong_to_the_caller(made: list[bytes]) -> None:
    """Writing to a result changes neither later results nor the arguments."""
    before = X.copy(), W.copy(), G.copy()
    first = F.convolution_backward(G, X, W, None, 1, 1)
    kept = [value.copy() for value in first]
    for value in first:
        value[...] = 0
    for value, expected in zip(F.convolution_backward(G, X, W, None, 1, 1), kept, strict=True):
        np.testing.assert_array_equal(value, expected)
    for array, expected in zip((X, W, G), before, strict=True):
        np.testing.assert_array_equal(array, expected)


# -- failures ----------------------------------------------------------------------------------------------------------


def _repeated(snippet: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the snippet in a process without onnx_convgrad, onnx and torch."""
    program = tmp_path / "snippet.py"
    program.write_text(f"import sys\nsys.modules.update(dict.fromkeys(['onnx_convgrad', 'onnx', 'torch']))\n{snippet}")
    command = [sys.executable, str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_a_failing_run_has_a_program_that_reproduces_it(
    made: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = mock.Mock(**{"run.side_effect": RuntimeError("out of luck")})
    broken.get_providers.return_value = ["CPUExecutionProvider"]
    monkeypatch.setattr(sessions, "session", lambda *_, **__: broken)
    with pytest.raises(ExecutionError, match="out of luck") as caught:
        F.convolution_backward(G.astype("complex64"), X.astype("complex64"), W.astype("complex64"), None, 1, 1)
    assert caught.value.snippet.strip() in str(caught.value)
    assert "convolution_backward giving input, weight, bias for complex64" in caught.value.snippet
    done = _repeated(caught.value.snippet, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "result_input float32 (2, 3, 8, 2)",
        "result_weight float32 (4, 3, 3, 2)",
        "result_bias float32 (4, 2)",
    ]


def test_a_refused_model_has_a_program_that_reproduces_it(
    made: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model for CUDA contains a float64 convolution, for which the CPU provider has no kernel."""
    monkeypatch.setattr(requests.Request, "target", "cuda")
    with pytest.raises(ExecutionError, match="NOT_IMPLEMENTED") as caught:
        F.convolution(X.astype(float), W.astype(float))
    done = _repeated(caught.value.snippet, tmp_path)
    assert done.returncode != 0
    assert "NOT_IMPLEMENTED" in done.stderr


def test_a_model_that_cannot_be_built_is_an_execution_error(made: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "build", mock.Mock(side_effect=ConvGradError("no way")))
    with pytest.raises(ExecutionError, match=r"No model could be built for convolution giving output .* no way"):
        F.convolution(X, W)


def test_a_missing_provider_has_no_snippet(made: list[bytes]) -> None:
    with pytest.raises(ConvGradError) as caught:
        F.convolution(X, W, providers=["TensorrtExecutionProvider"])
    assert not getattr(caught.value, "snippet", "")
    with pytest.raises(ArgumentError, match="Unknown provider 'gpu'"):
        F.convolution(X, W, providers="gpu")
    with pytest.raises(ArgumentError, match="Unknown session option 'tf23'"):
        F.convolution(X, W, options={"tf23": True})


@pytest.mark.slow
def test_no_session_outlives_its_plan(made: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sessions are kept as plans, however many calls there were; each has few threads."""
    for size in range(8, 8 + sessions.SESSIONS + 20):
        F.conv1d_weight(np.ones((1, 1, size), np.float32), (1, 1, 3), np.ones((1, 1, size - 2), np.float32))
    assert len(made) == sessions.SESSIONS + 20
    assert len(sessions._open) == plans.plan.cache_info().currsize == sessions.SESSIONS


def test_small_calls_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    original = sessions.session

    def noted(model: bytes, *, providers: Any, options: Any) -> Any:
        threads.append(options.threads)
        return original(model, providers=providers, options=options)

    monkeypatch.setattr(sessions.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(sessions, "session", noted)
    F.conv1d_weight(np.ones((1, 1, 77), np.float32), (1, 1, 3), np.ones((1, 1, 75), np.float32))
    F.conv2d_weight(np.ones((1, 16, 79, 8), np.float32), (16, 16, 3, 3), np.ones((1, 16, 77, 6), np.float32))
    assert threads == [1, 3]
