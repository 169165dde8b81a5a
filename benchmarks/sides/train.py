"""The sides of the training-step benchmark: one process each, for separate memory and environments.

    python -m benchmarks.sides.train eager|compile|jax|ort|ours FOLDER THREADS
    python -m benchmarks.sides.train prepare FOLDER     # model.onnx -> the artifacts of onnxruntime-training 1.19.2

A side takes a first step, then one for each line of standard input, and prints a line of JSON after each. Every side imports
only what it measures: `ort` has an environment of its own, and `ours` needs numpy and stock ONNX Runtime alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Step = Callable[[], float]
"""Takes a step and returns its loss."""


def eager(
    _folder: Path, plan: dict[str, Any], arrays: list[np.ndarray], threads: int, *, compiled: bool = False
) -> Step:
    """PyTorch."""
    import torch
    from torch.nn.functional import cross_entropy

    from benchmarks.networks import network

    torch.set_num_threads(threads)
    module = network(plan["network"]).module()
    x, target = map(torch.from_numpy, arrays)
    kind, settings = plan["optimizer"]
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=plan["learning_rate"], **settings)
    forward = torch.compile(module) if compiled else module

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax(_folder: Path, plan: dict[str, Any], arrays: list[np.ndarray], threads: int) -> Step:
    """The PyTorch module as one `jax.jit` of a step of plain SGD; torchax runs PyTorch's operators in JAX.

    XLA's CPU backend uses all cores, so `threads` must be their number.
    """
    assert threads == len(os.sched_getaffinity(0)), "jax.jit uses all cores"
    import jax
    import torchax
    from jax import numpy as jnp

    from benchmarks.networks import network

    module = network(plan["network"]).module()
    state, forward = torchax.extract_jax(module)
    moving = {name: state[name] for name in plan["parameters"]}
    fixed = {name: value for name, value in state.items() if name not in moving}
    x, target = map(jnp.asarray, arrays)

    def cost(weights: dict[str, Any]) -> Any:
        scores = jax.nn.log_softmax(forward({**fixed, **weights}, (x,)), axis=1)
        return -jnp.take_along_axis(scores, target[:, None], axis=1).mean()

    @partial(jax.jit, donate_argnums=0)
    def update(weights: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        loss, slopes = jax.value_and_grad(cost)(weights)
        return {name: value - plan["learning_rate"] * slopes[name] for name, value in weights.items()}, loss

    def step() -> float:
        nonlocal moving
        moving, loss = update(moving)
        return float(loss)

    return step


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


def data(folder: Path) -> list[np.ndarray]:
    """The batch: data, then labels."""
    return [np.load(folder / f"{name}.npy") for name in ("x", "target")]


def session_options(threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_mem_pattern = False  # it would allocate all memory a second time after the first run
    options.enable_mem_reuse = False  # it would keep dead values of the forward pass for values of the same shape
    return options


def ort(folder: Path, plan: dict[str, Any], arrays: list[np.ndarray], threads: int) -> Step:
    """onnxruntime-training."""
    from onnxruntime import OrtValue
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    made = folder / "artifacts"
    state = CheckpointState.load_checkpoint(str(made / "checkpoint"))
    module = Module(str(made / "training_model.onnx"), state, session_options=session_options(threads))
    optimizer = Optimizer(str(made / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(plan["learning_rate"])
    x, target = map(OrtValue.ortvalue_from_numpy, arrays)
    module.train()

    def step() -> float:
        result = module(x, target)
        loss = result[0] if isinstance(result, tuple) else result
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss.numpy())

    return step


def ours(folder: Path, plan: dict[str, Any], arrays: list[np.ndarray], threads: int) -> Step:
    """Our training program. Values alternate between two sets of buffers that are bound once, or stay in place."""
    from onnxruntime import InferenceSession, OrtValue

    value = OrtValue.ortvalue_from_numpy
    options = session_options(threads)
    session = InferenceSession(str(folder / "step.onnx"), options, providers=["CPUExecutionProvider"])
    fixed = dict(zip((plan["data"], plan["target"]), arrays, strict=True))
    fixed[plan["rate"]] = np.array(plan["learning_rate"], np.float32)
    inputs = {name: value(array) for name, array in fixed.items()}
    start = np.load(folder / "start.npz")
    first = {name: value(start[name]) for name in plan["next"]}
    second = {name: first[name] if name in plan["in_place"] else value(start[name]) for name in plan["next"]}
    loss = value(np.zeros((), np.float32))
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

    return step


def peak_memory() -> int:
    """Peak memory of this process in bytes.

    `ru_maxrss` is used only without /proc, since a process inherits it from its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(side: str, folder: Path, threads: int) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    arrays = data(folder)
    if side == "compile":
        step = eager(folder, plan, arrays, threads, compiled=True)
    else:
        step = {"eager": eager, "ort": ort, "ours": ours, "jax": jax}[side](folder, plan, arrays, threads)
    serve(step)


def serve(step: Step) -> None:
    """Take a step for each line of standard input, after a first one, and print a line of JSON after each."""
    loaded = peak_memory()
    while True:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss, "loaded": loaded, "peak": peak_memory()}), flush=True)
        if not sys.stdin.readline():
            return


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
