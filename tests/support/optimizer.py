"""The optimized model that ONNX Runtime runs, with its nodes in the order of execution."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort

LEVELS = {
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def optimized(given: onnx.ModelProto, folder: Path, level: str = "all") -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    options.log_severity_level = 3  # no warning that the file is specific to this machine
    ort.InferenceSession(given.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)
