"""onnxruntime-training 1.19.2, in an environment of its own.

python -m benchmarks.sides.ort_training prepare FOLDER     # model.onnx -> its training artifacts
python -m benchmarks.sides.ort_training FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.sides.serve import serve


def prepare(folder: Path) -> None:
    import onnx
    from onnxruntime.training import artifacts

    plan = json.loads((folder / "plan.json").read_text())
    (folder / "artifacts").mkdir()
    artifacts.generate_artifacts(
        onnx.load(folder / "model.onnx"),
        requires_grad=plan["parameters"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=str(folder / "artifacts"),
    )


def main(folder: Path, threads: int) -> None:
    import onnxruntime as ort
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    plan = json.loads((folder / "plan.json").read_text())
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_mem_pattern = options.enable_mem_reuse = False  # as on our side, to save memory
    made = folder / "artifacts"
    state = CheckpointState.load_checkpoint(str(made / "checkpoint"))
    module = Module(str(made / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(made / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(plan["learning_rate"])
    x, target = (ort.OrtValue.ortvalue_from_numpy(np.load(folder / f"{name}.npy")) for name in ("x", "target"))
    module.train()

    def step() -> float:
        result = module(x, target)
        loss = result[0] if isinstance(result, tuple) else result
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss.numpy())

    serve(step)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
