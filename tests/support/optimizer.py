"""What ONNX Runtime makes of a model when it loads it, nodes in the order in which it runs them."""

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
    options.log_severity_level = 3  # that the file is for this machine only is known
    ort.InferenceSession(given.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)
