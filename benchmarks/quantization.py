"""Table (q): accuracy and seconds of quantizers of one convolutional network, with the same images.

python -m benchmarks.quantization              # all sides, about 10 minutes
python -m benchmarks.quantization --quick      # nearest and AdaRound with few steps

The network is the ResNet-like one of `tests/quantization/test_accuracy.py`; 256 images calibrate. onnxsim works in an
environment of its own. Its `apply_qat` gets a Reshape in place of the Flatten, and fixed shapes, which it needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime import quantization

import onnx_convgrad as og
from benchmarks.environments import environment
from benchmarks.program import Row, carry_out, parser, table
from tests.quantization.test_accuracy import accuracy, aware, pictures, trained

NETWORK, SAMPLES = "ResNet-like", 256
SETTINGS = {
    "int8 per channel": {"weights": "int8", "per_channel": True},
    "int4 per channel": {"weights": "int4", "per_channel": True},
    "int4 per tensor": {"weights": "int4", "per_channel": False},
}
METHODS = {"nearest": None, "bias": None, "adaround": 300, "brecq": 300, "qat": 500}
LAYERS = ("Conv", "Gemm", "MatMul")
KINDS = {"int8": quantization.QuantType.QInt8, "int4": quantization.QuantType.QInt4}

ONNXSIM = """
import json, sys, time
import numpy as np, onnx, onnxsim
folder, mode = sys.argv[1:]
model, x = onnx.load(f"{folder}/{'fixed' if mode == 'qat' else 'model'}.onnx"), np.load(f"{folder}/x.npz")["x"]
batches = [{"x": x[i : i + 32]} for i in range(0, len(x), 32)]
start = time.perf_counter()
result = onnxsim.quantize_static(model, batches, full_graph=mode == "full")
if mode == "qat":
    options = dict(learn_activation_scales=True, batch_size=32, num_iterations=500)
    result = onnxsim.apply_qat(model, result, "x", "y", calibration_data=batches, **options)
for value in (*result.graph.input, *result.graph.output):
    value.type.tensor_type.shape.dim[0].dim_param = "N"
del result.graph.value_info[:]
onnx.save(result, f"{folder}/{mode}.onnx")
print(json.dumps(time.perf_counter() - start))
"""


class Batches(quantization.CalibrationDataReader):
    def __init__(self, x: np.ndarray) -> None:
        self.left = [{"x": x[i : i + 32]} for i in range(0, len(x), 32)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop(0) if self.left else None


def by_runtime(model: onnx.ModelProto, x: np.ndarray, weights: str, *, per_channel: bool) -> onnx.ModelProto:
    """`onnxruntime.quantization` alone, with its preprocessing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / "model.onnx")
        quantization.shape_inference.quant_pre_process(folder / "model.onnx", folder / "prepared.onnx")
        quantization.quantize_static(
            folder / "prepared.onnx", folder / "quantized.onnx", Batches(x), per_channel=per_channel,
            activation_type=quantization.QuantType.QInt8, weight_type=KINDS[weights],
        )  # fmt: skip
        return onnx.load(folder / "quantized.onnx")


def by_onnxsim(model: onnx.ModelProto, x: np.ndarray, mode: str) -> tuple[onnx.ModelProto, float] | None:
    """The result of a mode of onnxsim, and the seconds that it took; `None` if it cannot."""
    python = environment("onnxsim")
    if python is None:
        return None
    plain, fixed = onnx.ModelProto(), onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "Flatten":
            node.op_type = "Reshape"
            del node.attribute[:]
            node.input.append("rows")
            plain.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 32]), "rows"))
    fixed.CopyFrom(plain)
    for value in (fixed.graph.input[0], fixed.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 32
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(plain, folder / "model.onnx")
        onnx.save(onnx.shape_inference.infer_shapes(fixed), folder / "fixed.onnx")
        np.savez(folder / "x.npz", x=x)
        command = [str(python), "-c", ONNXSIM, str(folder), mode]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            print(f"onnxsim is left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        return onnx.load(folder / f"{mode}.onnx"), float(json.loads(done.stdout.splitlines()[-1]))


def integer_layers(model: onnx.ModelProto) -> str:
    """Number of layers with integer weights."""
    integers = {
        t.name for t in model.graph.initializer if t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4)
    }
    back = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in integers}
    layers = [node for node in model.graph.node if node.op_type in LAYERS]
    return f"{sum(node.input[1] in back for node in layers)} of {len(layers)}"


def sides(*, quick: bool) -> Iterator[tuple[str, Callable[..., onnx.ModelProto]]]:
    """Title -> a function that quantizes."""
    model, x = trained(NETWORK), pictures()[0][:SAMPLES]
    yield "onnxruntime.quantization", partial(by_runtime, model, x)
    for method, steps in METHODS.items():
        if not quick or method in ("nearest", "adaround"):
            yield (
                f"ours, {method}",
                partial(og.transforms.quantize, model, {"x": x}, method=method, iterations=20 if quick else steps),
            )
    if not quick:
        yield "ours, training with labels", partial(aware, NETWORK)


def measured(arguments: argparse.Namespace) -> list[Row]:
    model, x = trained(NETWORK), pictures()[0][:SAMPLES]
    exact = {"accuracy": accuracy(model)}
    rows: list[Row] = [{"title": "float", "layers": "", "results": dict.fromkeys(SETTINGS, exact)}]
    for title, function in sides(quick=arguments.quick):
        results: dict[str, Any] = {}
        for setting, options in SETTINGS.items():
            start = time.perf_counter()
            made = function(**options)
            results[setting] = {"seconds": time.perf_counter() - start, "accuracy": accuracy(made)}
        rows.append({"title": title, "layers": integer_layers(made), "results": results})
        print(title, results, flush=True)
    for mode, title in (
        ("full", "onnxsim, quantize_static(full_graph=True)"),
        ("qat", "onnxsim, apply_qat of the classifier"),
    ):
        done = by_onnxsim(model, x, mode)
        if done is not None:
            result = {"seconds": done[1], "accuracy": accuracy(done[0])}
            rows.append({"title": title, "layers": integer_layers(done[0]), "results": {"int8 per channel": result}})
    return rows


def show(rows: Sequence[Row]) -> None:
    columns = ["", "integer layers", *(cell for setting in SETTINGS for cell in (setting, "seconds"))]
    body = []
    for row in rows:
        cells = [row["title"], row["layers"]]
        for setting in SETTINGS:
            found = row["results"].get(setting, {})
            cells.append(f"{found['accuracy']:.1%}".replace("%", " %") if found else "-")
            cells.append(f"{found['seconds']:.1f}" if "seconds" in found else "")
        body.append(cells)
    print(f"\n{table(columns, body)}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("quantization", __doc__, "two methods with few steps", timing=False)
    carry_out(options, words, "quantization", measured, show)


if __name__ == "__main__":
    main()
