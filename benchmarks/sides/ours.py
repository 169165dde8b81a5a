"""Our training program on stock ONNX Runtime: `python -m benchmarks.sides.ours FOLDER THREADS`.

Needs only numpy and onnxruntime. Parameters alternate between two sets of buffers that are bound once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from benchmarks.sides.serve import serve


def value(array: np.ndarray) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array)


def empty_like(array: np.ndarray) -> Any:
    return ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype)


def main(folder: Path, threads: int) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_mem_pattern = False  # it would allocate all memory a second time after the first run
    options.enable_mem_reuse = False  # it would keep dead values of the forward pass for values of the same shape
    session = ort.InferenceSession(str(folder / "step.onnx"), options, providers=["CPUExecutionProvider"])
    plan = json.loads((folder / "plan.json").read_text())
    fixed = {plan["data"]: np.load(folder / "x.npy"), plan["target"]: np.load(folder / "target.npy")}
    fixed[plan["rate"]] = np.array(plan["learning_rate"], np.float32)
    inputs = {name: value(array) for name, array in fixed.items()}
    start = np.load(folder / "start.npz")
    first = {name: value(start[name]) for name in plan["next"]}
    second = {name: empty_like(start[name]) for name in plan["next"]}
    loss = empty_like(np.zeros((), np.float32))
    bindings = []
    for old, new in ((first, second), (second, first)):
        binding = session.io_binding()
        for name, held in {**inputs, **old}.items():
            binding.bind_ortvalue_input(name, held)
        binding.bind_ortvalue_output(plan["loss"], loss)
        for name, held in new.items():
            binding.bind_ortvalue_output(plan["next"][name], held)
        bindings.append(binding)

    def step() -> float:
        session.run_with_iobinding(bindings[0])
        bindings.reverse()
        return float(loss.numpy())

    serve(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
