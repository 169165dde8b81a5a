"""Sessions: forms of providers and options, and errors when CUDA cannot run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.runtime import SessionOptions, import_runtime, run, session
from onnx_convgrad.runtime import providers as providers_module
from onnx_convgrad.runtime.binding import Binding
from onnx_convgrad.runtime.providers import CPU, CUDA, check_available, missing_libraries, resolve_providers
from onnx_convgrad.runtime.session_options import cuda_options, session_options
from tests.support.one_input import graph_of

MODEL = graph_of("(float[N, 3] x) => (float[N, 3] y) { y = Relu (x) }", opset=21)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, [CPU]),
        ("cpu", [CPU]),
        (["cpu"], [CPU]),
        ("cuda", [CUDA]),
        ("CUDA", [CUDA]),
        (["cuda", "cpu"], [CUDA, CPU]),
        ([CUDA, CPU], [CUDA, CPU]),
        (("cuda", {"device_id": 1}), [CUDA]),
        ([("cuda", {"device_id": 1}), "cpu"], [CUDA, CPU]),
        (["DmlExecutionProvider"], ["DmlExecutionProvider"]),
    ],
)
def test_forms_of_providers(given: Any, wanted: list[str]) -> None:
    assert [name for name, _ in resolve_providers(given)] == wanted


def test_device_numbers() -> None:
    assert dict(resolve_providers("cuda:2"))[CUDA]["device_id"] == "2"
    assert dict(resolve_providers([("cuda", {"device_id": 3})]))[CUDA]["device_id"] == "3"


def test_options_of_a_provider_override_session_options() -> None:
    own = {"use_tf32": True, "cudnn_conv_algo_search": "DEFAULT"}
    pairs = resolve_providers([("cuda", own)], SessionOptions(tf32=False))
    assert dict(pairs)[CUDA]["use_tf32"] == "1"
    assert dict(pairs)[CUDA]["cudnn_conv_algo_search"] == "DEFAULT"
    assert dict(resolve_providers("cuda", SessionOptions(tf32=False)))[CUDA]["use_tf32"] == "0"


@pytest.mark.parametrize(
    ("resolve", "given", "message"),
    [
        (resolve_providers, [], "providers is empty"),
        (resolve_providers, ["tpu"], "Unknown provider 'tpu'. Did you mean 'cpu'"),
        (resolve_providers, ["cuda:x"], 'A device is given as "cuda:1"'),
        (resolve_providers, ["cpu:1"], "Unknown provider 'cpu:1'"),
        (resolve_providers, [3], "a name or a pair"),
        (SessionOptions.of, {"tf_32": False}, "Unknown session option 'tf_32'. Did you mean 'tf32'"),
        (SessionOptions.of, {"tf32": 1}, "tf32 must be True or False, not 1"),
        (SessionOptions.of, {"threads": 0}, "threads must be a positive number, not 0"),
        (SessionOptions.of, {"memory_limit": -1}, "memory_limit must be a positive number"),
        (SessionOptions.of, {"algorithm_search": "best"}, "There are: default, heuristic, exhaustive"),
    ],
)
def test_bad_providers_and_options(resolve: Callable[[Any], object], given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve(given)


def test_options_reach_the_runtime() -> None:
    ort = import_runtime()
    said = session_options(
        ort, SessionOptions.of({"deterministic": True, "threads": 2, "spinning": False}), optimize=False
    )
    assert said.use_deterministic_compute
    assert said.intra_op_num_threads == 2
    assert not said.enable_mem_pattern
    assert not said.enable_mem_reuse
    assert said.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert said.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = session_options(ort, SessionOptions(memory_pattern=True, memory_reuse=True), optimize=True)
    assert plain.enable_mem_pattern
    assert plain.enable_mem_reuse
    assert not plain.use_deterministic_compute


def test_options_reach_cuda() -> None:
    plain = cuda_options(SessionOptions())
    chosen = SessionOptions(
        tf32=False, algorithm_search="exhaustive", cuda_graph=True, prefer_nhwc=True, memory_limit=2**30
    )
    assert {key: value for key, value in cuda_options(chosen).items() if value != plain.get(key)} == {
        "use_tf32": "0",
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "enable_cuda_graph": "1",
        "prefer_nhwc": "1",
        "gpu_mem_limit": "1073741824",
    }


def test_a_session_runs_with_options() -> None:
    x = np.array([[-1, 0, 2]], np.float32)
    got = run(MODEL, {"x": x}, providers="cpu", options={"threads": 1, "spinning": False, "deterministic": True})
    np.testing.assert_array_equal(got["y"], np.maximum(x, 0))
    assert session(MODEL.SerializeToString()).get_providers() == [CPU]


def test_refused_models() -> None:
    bad = onnx.ModelProto()
    bad.CopyFrom(MODEL)
    bad.graph.node[0].op_type = "Rela"
    with pytest.raises(ExecutionError, match="ONNX Runtime refused the model"):
        session(bad)


# -- missing CUDA ------------------------------------------------------------------------------------------------------


class _Runtime:
    """The parts of the `onnxruntime` module that `check_available` uses, as in the package for GPUs."""

    __version__ = "1.31.1"
    cuda_version = "13.0"

    def __init__(self, *available: str) -> None:
        self.available = [*available, CPU]

    def get_available_providers(self) -> list[str]:
        return self.available

    def preload_dlls(self) -> None:
        sys.stdout.write("Failed to load libcublas.so.13")


@pytest.mark.parametrize(
    ("available", "answers", "message"),
    [
        (
            [],
            {"_cpu_only": True},
            r"has no CUDAExecutionProvider here.*pip uninstall -y onnxruntime`, then .*onnxruntime-gpu",
        ),
        ([CUDA], {"_loads": True, "_devices": 0}, "driver shows no GPU"),
    ],
)
def test_cuda_that_cannot_run(
    available: list[str], answers: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in answers.items():
        monkeypatch.setattr(providers_module, name, lambda *_, answer=answer: answer)
    with pytest.raises(ExecutionError, match=message):
        check_available(_Runtime(*available), [CUDA])


def test_missing_libraries_are_named_with_their_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(providers_module, "_loads", lambda name: name.startswith(("libcudart", "libcuda.")))
    with pytest.raises(ExecutionError) as caught:
        check_available(_Runtime(CUDA), [CUDA])
    assert "libcublas.so.13 (nvidia-cublas)" in str(caught.value)
    assert "libcudnn.so.9 (nvidia-cudnn-cu13)" in str(caught.value)
    assert "libcudart" not in str(caught.value)
    assert '`python -m pip install "onnxruntime-gpu[cuda,cudnn]"` installs them' in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers_module, "_loads", lambda name: not name.startswith("libcuda."))
    with pytest.raises(
        ExecutionError, match=r"missing libcuda.so.1 \(the NVIDIA driver\). Install the NVIDIA driver\.$"
    ):
        check_available(_Runtime(CUDA), [CUDA])


def test_cuda_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers_module, "_loads", lambda _: True)
    monkeypatch.setattr(providers_module, "_devices", lambda: 1)
    check_available(_Runtime(CUDA), [CUDA])


def test_libraries_are_loaded() -> None:
    assert "libcublas.so.999" in missing_libraries(999)


def test_a_silent_fallback_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime creates a session on the CPU if a provider that it lists cannot start."""
    from onnx_convgrad import runtime

    monkeypatch.setattr(runtime, "check_available", lambda *_: None)
    with (
        pytest.raises(ExecutionError, match=r"could not start|refused"),
        pytest.warns(UserWarning, match="CUDAExecution"),
    ):
        session(MODEL, providers=["cuda"])


# -- values that stay on the device ------------------------------------------------------------------------------------


def test_results_of_one_run_feed_the_next() -> None:
    """The swap of a training loop: two bindings, each of which writes the operands of the other."""
    model = graph_of(
        "(float[2] w, float[2] x) => (float[2] next, float loss)"
        "{ next = Add (w, x) loss = ReduceSum <keepdims: int = 0> (next) }"
    )
    live = session(model)
    there, back = Binding(live), Binding(live)
    start = np.zeros(2, np.float32)
    first, second = there.put(start), there.put(start)
    there.bind({"w": first})
    there.bind_results({"next": second}, host=["loss"])
    back.bind({"w": second})
    back.bind_results({"next": first}, host=["loss"])
    losses = []
    for step in range(4):
        half = back if step % 2 else there
        half.bind({"x": np.array([1, step], np.float32)})
        half.run()
        losses.append(float(half.results()["loss"].numpy()))
    np.testing.assert_array_equal(first.numpy(), [4, 6])
    assert losses == [1, 3, 6, 10]
    assert not start.any()
    assert there.put(np.array(3, np.float32)).shape() == []  # a learning rate stays a scalar


def test_binding_an_unknown_input() -> None:
    with pytest.raises(ArgumentError, match=r"no input 'w'. It has x"):
        Binding(session(MODEL)).bind({"w": np.zeros(3, np.float32)})
