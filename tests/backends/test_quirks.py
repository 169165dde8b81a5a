"""Faults of other packages are still there: a test that fails here names the workaround to delete."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_shape_inference
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass
from packaging.specifiers import SpecifierSet

from onnx_convgrad.backends import quirks
from onnx_convgrad.backends.quirks import QUIRKS, Quirk
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import import_runtime, run, session
from onnx_convgrad.runtime.providers import CUDA
from tests.support.one_input import graph_of
from tests.support.runtime_faults import FAULTS

ROOT = Path(__file__).parents[2]


def parsed(body: str, inputs: str, outputs: str = "y", constants: str = "") -> onnx.ModelProto:
    """A model from text, with outputs of undeclared shape."""
    return graph_of(f"({inputs}) => ({outputs}) {constants} {{ {body} }}", opset=21)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def random_feed(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random operands, and zeros as indices; unknown sizes are 0."""
    feed = {}
    for value in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = numbers(*(d.dim_value for d in value.type.tensor_type.shape.dim)).astype(dtype)
        feed[value.name] = array if dtype.kind == "f" else np.zeros_like(array)
    return feed


def fails(model: onnx.ModelProto, feed: dict[str, np.ndarray], **options: Any) -> bool:
    """Whether ONNX Runtime refuses a model or fails to run it."""
    try:
        run(model, feed, **options)
    except Exception:  # noqa: BLE001 - any failure is the fault
        return True
    return False


def inferred(model: onnx.ModelProto) -> tuple[int, ...]:
    """The shape of the output that ONNX infers."""
    (output,) = onnx.shape_inference.infer_shapes(model).graph.output
    return tuple(d.dim_value for d in output.type.tensor_type.shape.dim)


def dies(model: onnx.ModelProto, feed: dict[str, np.ndarray], folder: Path, seconds: float) -> bool:
    """Whether a process that runs the model is killed by a signal, or does not end in time after it has started to run."""
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "feed.npz", **feed)
    code = (
        "import numpy as np, onnxruntime as ort; s = ort.InferenceSession('model.onnx'); "
        "f = dict(np.load('feed.npz')); print('ready', flush=True); s.run(None, f)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        return b"ready" in (late.stdout or b"")
    return done.returncode < 0


# -- one function per quirk: whether the fault is there ----------------------------------------------------------------


def batch_normalization_in_place(_: Path) -> bool:
    body = "a = Mul(s, k) b = Mul(s, k) n, m, v = BatchNormalization<training_mode = 1, momentum = 0.5>(x, s, s, a, b)"
    model = parsed(f"{body} y = Neg(m) z = Neg(v)", "float[4, 3, 5] x, float[3] s", "y, z", "<float[3] k = {1, 2, 3}>")
    got = run(model, {"x": 3 + numbers(4, 3, 5), "s": np.ones(3, np.float32)})
    return np.array_equal(got["y"], got["z"])


def col2im_axes(_: Path) -> bool:
    constants = "<int64[1] size = {5}, int64[1] block = {2}>"
    model = parsed("y = Col2Im(x, size, block)", "float[1, 2, 4] x", constants=constants)
    got = run(model, {"x": np.ones((1, 2, 4), np.float32)})["y"]
    return not np.array_equal(got, [[[1, 2, 2, 2, 1]]])


def expand_to_nothing(_: Path) -> bool:
    model = parsed("n = Neg(x) e = Expand(n, s) y = Neg(e)", "float[1, 3] x", constants="<int64[2] s = {0, 3}>")
    return run(model, {"x": numbers(1, 3)})["y"].shape != (0, 3)


def int8_levels(_: Path) -> bool:
    """Levels stay int8 on other processors than x86: there the fault cannot show."""
    if platform.machine() != "x86_64":
        return True
    body = "d = DequantizeLinear(q, s, z) r = Transpose(d) y = Exp(r)"
    levels = {"q": np.ones((3, 4), np.int8)}
    return fails(parsed(body, "int8[3, 4] q", constants="<float s = {0.1}, int8 z = {3}>"), levels)


def negative_step_to_max(_: Path) -> bool:
    constants = "<int64[1] s = {1}, int64[1] e = {2147483647}, int64[1] a = {0}, int64[1] d = {-1}>"
    model = parsed("y = Slice(x, s, e, a, d)", "float[4] x", constants=constants)
    return run(model, {"x": numbers(4)})["y"].shape != inferred(model)


def pool_beyond_padding(_: Path) -> bool:
    body = "y = AveragePool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1, count_include_pad = 1>(x)"
    return bool((run(parsed(body, "float[1, 16, 5, 5] x"), {"x": np.ones((1, 16, 5, 5), np.float32)})["y"] != 1).any())


def pool_padding_axes(_: Path) -> bool:
    body = "y = AveragePool<kernel_shape = [2, 2], pads = [0, 0, 1, 1], count_include_pad = 1>(x)"
    got = run(parsed(body, "float[1, 1, 2, 2] x"), {"x": np.ones((1, 1, 2, 2), np.float32)})["y"]
    return not np.array_equal(got, [[[[1, 0.5], [0.5, 0.25]]]])


def pad_trims_all(_: Path) -> bool:
    model = parsed("y = Pad(x, p)", "float[2, 3] x", constants="<int64[4] p = {-2, 0, 3, 0}>")
    return bool(run(model, {"x": 1 + numbers(2, 3) ** 2})["y"].any())


def float16_unrounded(_: Path) -> bool:
    body = 'x = Exp(v) y = ScatterElements<reduction = "max">(x, i, u) z = Equal(x, y)'
    model = parsed(body, "float16[64] v", "bool[64] z, float16[64] y", "<int64[1] i = {0}, float16[1] u = {0}>")
    return not run(model, {"v": numbers(64).astype(np.float16)})["z"].all()


def quantized_error(body: str, outputs: str, folder: Path) -> float:
    """The largest error of the first output after ONNX Runtime's quantizer."""
    from onnxruntime import quantization  # it is slow to import

    x, (plain, changed) = numbers(16, 4), (folder / f"{name}.onnx" for name in ("plain", "changed"))
    model = parsed(body, "float[16, 4] x", outputs, "<float[8] b = {8, 8, 8, 8, 8, 8, 8, 8}>")
    model.graph.initializer.append(numpy_helper.from_array(numbers(4, 8), "w"))
    onnx.save(model, plain)
    batches = iter([{"x": x}])
    quantization.quantize_static(plain, changed, SimpleNamespace(get_next=lambda: next(batches, None)))
    want, got = (run(str(path), {"x": x})[model.graph.output[0].name] for path in (plain, changed))
    return float(np.abs(want - got).max())


def quantized_beta(folder: Path) -> bool:
    return quantized_error("y = Gemm<beta = 2.0>(x, w, b)", "float[16, 8] y", folder) > 4


def quantized_output(folder: Path) -> bool:
    outputs = "float[16, 8] h, float[16, 8] y"
    return quantized_error("h = MatMul(x, w) y = Relu(h)", outputs, folder) > 1


def resize_rounding(_: Path) -> bool:
    model = parsed("y = Resize(x, , s)", "float[1, 1, 12] x", constants="<float[3] s = {1, 1, 0.58333333}>")
    return run(model, {"x": numbers(1, 1, 12)})["y"].shape != inferred(model)


def scatter_nd_add(_: Path) -> bool:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two processors")
    count = 1_000_000
    model = parsed('y = ScatterND<reduction = "add">(d, i, u)', "float[8] d, int64[N, 1] i, float[N] u")
    feed = {"d": np.zeros(8, np.float32), "i": np.zeros((count, 1), np.int64), "u": np.ones(count, np.float32)}
    live = session(model, options={"threads": 2})
    return any(live.run(None, feed)[0][0] != count for _ in range(100))


def sigmoid_tail(_: Path) -> bool:
    got = run(parsed("y = Sigmoid(x)", "float[2] x"), {"x": np.array([-12, -19], np.float32)})["y"]
    return bool(abs(got[0] * (1 + np.exp(12.0)) - 1) > 1e-3 or got[1] <= 0)


def squeeze_no_axes(_: Path) -> bool:
    model = parsed("y = Squeeze(x, a)", "float[1, 3, 1] x", constants="<int64[0] a = {}>")
    return run(model, {"x": numbers(1, 3, 1)})["y"].ndim != 3


def vector_times_transpose(_: Path) -> bool:
    w, g = numbers(2, 3, 4), numbers(3)
    model = parsed("t = Transpose<perm = [0, 2, 1]>(w) y = MatMul(t, g)", "float[2, 3, 4] w, float[3] g")
    return not np.allclose(run(model, {"w": w, "g": g})["y"], w.transpose(0, 2, 1) @ g, atol=1e-5)


def conv_no_channels(folder: Path) -> bool:
    model = parsed("y = Conv(x, w)", "float[2, N, 5, 5] x, float[4, N, 3, 3] w")
    return dies(model, random_feed(model), folder, 30)


def float16_fused_matmul(folder: Path) -> bool:
    model = parsed("t = Transpose<perm = [1, 2, 0]>(x) y = MatMul(t, w)", "float16[2, 3, 4] x")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 5), np.float16), "w"))
    return dies(model, random_feed(model), folder, 120)


def einsum_of_nothing(folder: Path) -> bool:
    model = parsed('y = Einsum<equation = "bik,bjk->bij">(a, b)', "float[N, 3, 2] a, float[N, 4, 2] b")
    return dies(model, {"a": np.zeros((0, 3, 2), np.float32), "b": np.zeros((0, 4, 2), np.float32)}, folder, 120)


def scan_of_empty_slices(folder: Path) -> bool:
    body = "b (float[N, 3] p) => (float[N, 3] q) { q = Neg(p) }"
    node = f"y = Scan<num_scan_inputs = 1, scan_output_axes = [1], body = {body}>(x)"
    model = parsed(node, "float[2, N, 3] x")
    return dies(model, random_feed(model), folder, 120)


def empty_batch(folder: Path) -> bool:
    model = parsed('y = Einsum<equation = "ij,jk->ik">(a, b)', "float[N, 3] a, float[3, 4] b")
    return dies(model, random_feed(model), folder, 120) or fails(model, random_feed(model))


def float64_recurrent(_: Path) -> bool:
    model = parsed("y = LSTM<hidden_size = 2>(x, w, r)", "double[3, 1, 4] x, double[1, 8, 4] w, double[1, 8, 2] r")
    session(model)
    return fails(model, random_feed(model))


def cuda_batch_statistics(_: Path) -> bool:
    if CUDA not in import_runtime().get_available_providers():
        pytest.skip("needs the CUDA provider")
    model = parsed("y, m, v = BatchNormalization<training_mode = 1>(x, s, s, s, s)", "float[4, 3, 5] x, float[3] s")
    feed = {"x": numbers(4, 3, 5), "s": np.ones(3, np.float32)}
    return fails(model, feed, providers=["cuda"])


def broadcast_symbols(folder: Path) -> bool:
    """In a process of its own, since this package corrects the inference of its process."""
    onnx.save(parsed("y = Add(a, b)", "float[p] a, float[q] b"), folder / "model.onnx")
    code = (
        "import onnx, onnx_ir as ir, onnx_shape_inference as inference; m = ir.from_proto(onnx.load('model.onnx')); "
        "inference.infer_symbolic_shapes(m); print(m.graph.outputs[0].shape[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "p"


def clone_unsorted(_: Path) -> bool:
    model = ir.from_proto(parsed("y = Neg(t) t = Neg(x)", "float[3] x"))
    try:
        model.clone()
    except RuntimeError:
        return True
    return False


def readers_in_bodies(_: Path) -> bool:
    body = "b () => (float[3] t) { t = Exp(v) }"
    branches = f"<then_branch: graph = {body}, else_branch: graph = {body}>"
    model = ir.from_proto(parsed(f"v = Neg(x) z = If {branches} (c) y = Tanh(x)", "float[3] x, bool c"))
    RemoveUnusedNodesPass()(model)
    return "Neg" in {node.op_type for node in model.graph}


def result_names(_: Path) -> bool:
    body = "b () => (float[3] t) { val_0 = Exp(x) t = Exp(val_0) }"
    branches = f"<then_branch: graph = {body}, else_branch: graph = {body}>"
    graph = ir.from_proto(parsed(f"y = If {branches} (c)", "float[3] x, bool c")).graph
    graph.append(node := ir.Node("", "Exp", [graph.inputs[0]], num_outputs=1))
    return node.outputs[0].name == "val_0"


def deleted_outputs(_: Path) -> bool:
    graph = ir.from_proto(parsed("y = Add(a, b)", "float[3] a, float[3] b")).graph
    value = graph.outputs[0]
    del graph.outputs[:]
    return value.is_graph_output()


def dimension_names(_: Path) -> bool:
    proto = parsed("c = Concat<axis = 0>(x, x) y = Neg(c)", "float[N] x")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "?"
    try:
        onnx_shape_inference.infer_symbolic_shapes(ir.from_proto(proto))
    except ValueError:
        return True
    return False


class _Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


def merged_initializers(_: Path) -> bool:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(_Norms().eval(), (torch.zeros(2, 3, 4),), file, dynamo=False)
    model = onnx.load_from_string(file.getvalue())
    return len(model.graph.initializer) < 8


def reference_lrn(_: Path) -> bool:
    model, x = parsed("y = LRN<size = 3>(x)", "float[1, 6, 2, 2] x"), 30 * numbers(1, 6, 2, 2)
    return not np.allclose(ReferenceEvaluator(model).run(None, {"x": x})[0], run(model, {"x": x})["y"], rtol=1e-3)


def stft_sides(_: Path) -> bool:
    nodes = "s = Constant <value_int = 4> () n = Constant <value_int = 8> () y = STFT (x, s, w, n)"
    return inferred(parsed(nodes, "float[1, 16] x, float[8] w")) != (1, 3, 5, 2)


# -- models that fail -------------------------------------------------------------------------------------------------


def webgpu_grouped_conv(_: Path) -> bool:
    model = parsed("y = Conv<group = 2>(x, w)", "float[1, 2, 5] x, float[10, 1, 3] w")
    feed = {"x": numbers(1, 2, 5), "w": numbers(10, 1, 3)}
    return not np.allclose(run(model, feed, providers="webgpu")["y"], run(model, feed)["y"], atol=1e-4)


def webgpu_conv_of_threes(_: Path) -> bool:
    model = parsed("y = Conv(x, w)", "float[1, 6, 5, 5] x, float[8, 6, 3, 3] w")
    feed = {"x": numbers(1, 6, 5, 5), "w": numbers(8, 6, 3, 3)}
    return not np.allclose(run(model, feed, providers="webgpu")["y"], run(model, feed)["y"], atol=1e-4)


def _differs_on_openvino(text: str) -> bool:
    """Whether OpenVINO computes y of a model with the constant w as the CPU provider does not."""
    model = graph_of(text, opset=21)
    for weight in model.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(numbers(*weight.dims), weight.name))
    feed = {"x": numbers(*(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim))}
    return not np.allclose(run(model, feed, providers="openvino")["y"], run(model, feed)["y"], atol=1e-4)


_SQUARE = "float[2, 2] w = {1, 2, 3, 4}"


def openvino_packed_weights(_: Path) -> bool:
    return _differs_on_openvino(f"(float[5, 2] x) => (y) <{_SQUARE}> {{ t = Gemm<transB = 1>(x, w) y = Gemm(t, w) }}")


def openvino_defaults(_: Path) -> bool:
    text = f"(float[5, 2] x, float[2, 2] w) => (y) <{_SQUARE}> {{ t = Gemm<transB = 1>(x, w) y = Gemm(t, w) }}"
    return _differs_on_openvino(text)


def openvino_zero_shift(_: Path) -> bool:
    return _differs_on_openvino("(float[5, 2] x) => (y) { y = HardSigmoid<alpha = 1.0, beta = 0.0>(x) }")


FAILING = {
    "CONSTANT_RANGE_VECTOR": """(float[1] x) => (y) <int64 start = {0}, int64[1] limit = {4}, int64 step = {1}>
        { y = Range(start, limit, step) }""",
    "CONV_EMPTY_AXIS": "(float[1, 8, N] x, float[4, 8, 1] w) => (y) { y = Conv(x, w) }",
    "EINSUM_ELLIPSIS_RANKS": """(float[2, 3, 4] a, float[5, 4] b) => (y)
        { y = Einsum<equation = "...mn,...kn->...mk">(a, b) }""",
    "EMPTY_SCAN": """(float[N, 3] x) => (y)
        { y = Scan<num_scan_inputs = 1, body = b (float[3] p) => (float[3] q) { q = Neg(p) }>(x) }""",
    "FLOAT16_SCATTER_ADD": """(float16[8] d, int64[3] i, float16[3] u) => (y)
        { y = ScatterElements<reduction = "add">(d, i, u) }""",
    "FLOAT64_ACTIVATIONS": "(double[4] x) => (y) { y = Elu(x) }",
    "FLOAT64_CONV": "(double[1, 1, 4] x, double[1, 1, 2] w) => (y) { y = Conv(x, w) }",
    "FLOAT64_FUSED_MATMUL": """(double[2, 3] a, double[2, 4] b) => (y)
        { t = Transpose<perm = [1, 0]>(a) y = MatMul(t, b) }""",
    "GEMM_SHAPE_NAMES": """(float[2, 3, 4] x, float[4, 5] w, float[5] b) => (y) <int64[1] gemm_input_shape = {-1}>
        { t = MatMul(x, w) z = Add(t, b) y = Reshape(z, gemm_input_shape) }""",
    "OUTPUT_PADDING": """(float[1, 1, 4] x, float[1, 1, 2] w) => (y)
        { y = ConvTranspose<strides = [2], dilations = [3], output_padding = [2]>(x, w) }""",
    "PAD_AXES": """(float[2, 3, 4] x) => (y) <int64[2] pads = {1, 0}, int64[1] axes = {1}>
        { t = Transpose<perm = [0, 2, 1]>(x) p = Pad(t, pads, , axes) y = Transpose<perm = [0, 2, 1]>(p) }""",
    "PAD_OF_WEIGHT": """(float[1, 2, 5, 5] x, float[3, 2, 1, 1] w) => (y) <int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}>
        { p = Pad(w, pads) y = Conv(x, p) }""",
    "SAME_DILATION": """(float[1, 1, 8] x, float[1, 1, 3] w) => (y)
        { y = Conv<auto_pad = "SAME_UPPER", dilations = [2]>(x, w) }""",
}


def _fails(text: str) -> Callable[[Path], bool]:
    model = graph_of(text, opset=21)
    return lambda _: fails(model, random_feed(model))


REPRODUCTIONS: dict[str, Callable[[Path], bool]] = {
    **{name.upper(): function for name, function in list(globals().items()) if name.upper() in QUIRKS},
    **{name: _fails(text) for name, text in FAILING.items()},
}

NOT_REPRODUCED = {
    "CUDA_ASYMMETRIC_PADS": "the node may run on the CPU without an error; `tests/backends/cuda` checks the placement",
    "CUDA_MAX_POOL_INDICES": "was read in the sources and issues of ONNX Runtime",
    "CUDA_OPSET": "the node runs on the CPU without an error; `tests/backends/cuda` checks the placement",
    **dict.fromkeys(
        [f"CUDA_{name}" for name in "SCATTERED_SUMS PAD HALF_BIAS SAMPLES ONE_HOT_CONV LARGE_WINDOWS NHWC".split()],
        "was measured on an H100 with onnxruntime-gpu 1.31.1",
    ),
    "JS_INPUT_DEFAULTS": "needs Node.js",
}


def _installed(package: str) -> str | None:
    for name in [package, *(["onnxruntime-gpu"] if package == "onnxruntime" else [])]:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


@pytest.mark.parametrize("name", sorted(REPRODUCTIONS))
def test_the_fault_is_still_there(name: str, tmp_path: Path) -> None:
    quirk = QUIRKS[name]
    installed = _installed(quirk.package)
    if installed is None:
        pytest.skip(f"needs {quirk.package}")
    if not SpecifierSet(quirk.versions, prereleases=True).contains(installed):
        pytest.skip(f"concerns {quirk.package} {quirk.versions}; installed is {installed}")
    assert REPRODUCTIONS[name](tmp_path), (
        f"{quirk.package} {installed} no longer has this fault: {quirk.symptom} Give quirks.{name} its last version, and "
        f"delete the workaround in {quirk.workaround} when older versions are no longer supported."
    )


@pytest.mark.parametrize("quirk", QUIRKS.values(), ids=lambda quirk: quirk.name)
def test_entries_are_complete(quirk: Quirk) -> None:
    """A name, valid versions, a workaround that exists, and a reproduction or a reason why there is none."""
    assert getattr(quirks, quirk.name) is quirk
    SpecifierSet(quirk.versions)
    assert importlib.util.find_spec(quirk.workaround) is not None
    assert quirk.symptom.endswith(".")
    assert (quirk.name in REPRODUCTIONS) != (quirk.name in NOT_REPRODUCED)


def test_tests_that_are_skipped_with_older_runtimes_agree() -> None:
    """The first version that passes a test is not one with the fault."""
    shared = [(right, fault) for right, tests in FAULTS.items() for fault in tests.values() if isinstance(fault, Quirk)]
    assert shared
    for right, fault in shared:
        assert not SpecifierSet(fault.versions).contains(right), fault.name


def test_comments_name_existing_quirks() -> None:
    for folder in ("onnx_convgrad", "rules"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"quirks\.([A-Z][A-Z0-9_]+)", path.read_text(encoding="utf-8")):
                assert name in QUIRKS, f"{path}: quirks.{name}"


def test_a_reproduction_that_fails_to_run_is_a_fault() -> None:
    """`fails` takes a refusal and a failure at run time alike, and a model that runs for none."""
    model = parsed("y = Neg(x)", "float[3] x")
    assert not fails(model, {"x": numbers(3)})
    assert fails(model, {"x": numbers(4)})
    model.graph.node[0].op_type = "Nag"
    with pytest.raises(ExecutionError):
        session(model)
    assert fails(model, {"x": numbers(3)})
