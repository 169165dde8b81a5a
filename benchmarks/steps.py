"""Table (b): time and peak memory of whole training steps (forward, cross-entropy, backward, update).

    python -m benchmarks.steps                     # all networks
    python -m benchmarks.steps resnet18 unet       # these
    python -m benchmarks.steps --others            # networks on which the lowerings were not tuned
    python -m benchmarks.steps --optimizer adam    # instead of plain SGD
    python -m benchmarks.steps --compile           # torch.compile and jax.jit too: minutes of compiling per network

Each side is a process of its own with the same network, data and learning rate; they run in turns, one step at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

import onnx_convgrad as og
from benchmarks.environments import environment
from benchmarks.networks import NETWORKS, OTHERS, export, network
from benchmarks.program import Row, announced, carry_out, geometric_mean, parser, table
from onnx_convgrad.bench.timing import calm
from onnx_convgrad.memory.in_place import written_over
from onnx_convgrad.memory.timeline import timeline

ROOT = Path(__file__).parent.parent
RATE = 1e-3
OPTIMIZERS = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {})}
"""Class and options, of the same names in PyTorch and here."""

SIDES = {"eager": "PyTorch", "compile": "torch.compile", "jax": "jax.jit", "ort": "ORT training 1.19.2", "ours": "ours"}


def prepare(
    name: str,
    folder: Path,
    batch: int,
    size: int,
    *,
    ort: Path | None,
    lowering: str = "auto",
    optimizer: str = "sgd",
    **options: Any,
) -> Row:
    """Write the files that the sides read; return the time of the build, and why a side is left out.

    `options` are further keywords of `build_training`; `wrt` may be a function from the names of the parameters.
    """
    net = network(name)
    module = net.module()
    x, target = net.data(batch, size)
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "target.npy", target.numpy())
    proto = export(module, x)
    onnx.save(proto, folder / "model.onnx")
    kind, settings = OPTIMIZERS[optimizer]
    ours = getattr(og.optim, kind)(lr=RATE, **settings)
    if callable(options.get("wrt")):
        options["wrt"] = options["wrt"]([n for n, _ in module.named_parameters()])
    start = time.perf_counter()
    loss = {"y": "cross_entropy"}
    program = og.build_training(
        proto, loss=loss, optimizer=ours, outputs=[], target=og.Target(lowering=lowering), **options
    )
    step = program.step
    seconds = time.perf_counter() - start
    m = program.manifest
    moving = m.moving()
    stored = {t.name: numpy_helper.to_array(t) for t in step.graph.initializer}
    (folder / "step.onnx").write_bytes(without(step, {v.name for v in moving}).SerializeToString())
    np.savez(folder / "start.npz", **{v.name: stored[v.name] for v in moving})
    plan = {
        "network": name,
        "optimizer": [kind, settings],
        "learning_rate": RATE,
        "parameters": [n for n, _ in module.named_parameters()],
        "data": m.data[0].name,
        "target": m.targets[0].name,
        "rate": m.learning_rate.name,
        "loss": m.loss,
        "next": {v.name: v.next for v in moving},
        "in_place": [v.name for v in written_over(program.model("step").graph).values()],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    facts: Row = {"network": name, "title": net.title, "x": list(x.shape), "missing": {}}
    memory = timeline(ir.from_proto(step).graph)
    doubled = (v.name for v in moving if v.name not in plan["in_place"])  # those with a buffer for the next value
    held = memory.fixed + sum(stored[name].nbytes for name in doubled)
    facts |= {"build": seconds, "nodes": len(step.graph.node), "predicted": memory.peak, "held": held}
    if ort:
        command = [str(ort), "-m", "benchmarks.sides.train", "prepare", str(folder)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            facts["missing"]["ort"] = why(result.stderr)
    return facts


def without(step: onnx.ModelProto, fed: Collection[str]) -> onnx.ModelProto:
    """Remove the default values of inputs, as `Trainer` does: a session would hold a copy of them."""
    kept = [t for t in step.graph.initializer if t.name not in fed]
    bare = onnx.ModelProto()
    bare.CopyFrom(step)
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    return bare


def why(errors: str) -> str:
    """The last informative line of a failure; of a long line the end, since the beginning is mostly source locations."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    text = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no reason given")
    return text if len(text) <= 200 else f"... {text[-200:]}"


class Side:
    """The process of one side; the constructor waits for its first step."""

    def __init__(self, command: Sequence[str]) -> None:
        self.errors = TemporaryDirectory()
        self.log = Path(self.errors.name) / "errors"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.answers: list[Row] = []
        self.read()

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries may print other lines
                self.answers.append(json.loads(line))
                return
        raise RuntimeError(why(self.log.read_text()))

    def step(self) -> float:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        self.read()
        return self.answers[-1]["seconds"]

    def close(self) -> None:
        self.process.communicate()
        self.errors.cleanup()


def commands(
    wanted: Sequence[str], folder: Path, threads: int, peers: Mapping[str, Path | None]
) -> dict[str, list[str]]:
    """The command of every side; `peers` are the Pythons of those with an environment of their own."""
    pythons = {**dict.fromkeys(SIDES, sys.executable), **peers}
    arguments = [str(folder), str(threads)]
    return {
        name: [str(python), "-m", "benchmarks.sides.train", name, *arguments]
        for name, python in pythons.items()
        if name in wanted and python
    }


def measure(facts: Row, sides: Mapping[str, list[str]], repeats: int) -> Row:
    """Measure the least seconds of a step of each side, its peak memory and losses. Other guests of the host add time."""
    running: dict[str, Side] = {}
    try:
        for name, command in sides.items():
            if name not in facts["missing"]:
                try:
                    running[name] = Side(command)
                except RuntimeError as problem:
                    facts["missing"][name] = str(problem)
        for side in running.values():
            side.step()  # the second step is slower than later ones
        laps: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(repeats):
            for name, side in running.items():
                laps[name].append(calm(side.step, tries=3)[0])
    finally:
        for side in running.values():
            side.close()
    facts["seconds"] = {name: min(times) for name, times in laps.items()}
    facts["peak"] = {name: side.answers[-1]["peak"] for name, side in running.items()}
    facts["loaded"] = {name: side.answers[0]["loaded"] for name, side in running.items()}
    facts["losses"] = {name: [a["loss"] for a in side.answers] for name, side in running.items()}
    return facts


# -- printing ------ ----------------------------------------------------------------------------------------------------


def print_steps(rows: Sequence[Row]) -> None:
    names = [name for name in SIDES if any(name in row["seconds"] for row in rows)]
    others = [name for name in names if name != "ours"]
    columns = ["network", "input", *(f"{SIDES[n]} ms" for n in names), *(f"{SIDES[n]} / ours" for n in others)]
    columns += [f"{SIDES[n]} MB" for n in names]
    body = []
    for row in rows:
        times, peaks = row["seconds"], row["peak"]
        cells = [row["title"], "x".join(map(str, row["x"]))]
        cells += [f"{1e3 * times[n]:.0f}" if n in times else "-" for n in names]
        cells += [f"{times[n] / times['ours']:.2f}" if n in times and "ours" in times else "-" for n in others]
        cells += [f"{peaks[n] / 1e6:.0f}" if n in peaks else "-" for n in names]
        body.append(cells)
    print(f"\n{table(columns, body)}\n")
    both = [row for row in rows if "ours" in row["seconds"]]
    for n in others:
        times = [row["seconds"][n] / row["seconds"]["ours"] for row in both if n in row["seconds"]]
        peaks = [row["peak"]["ours"] / row["peak"][n] for row in both if n in row["peak"]]
        print(
            f"{SIDES[n]}'s time over ours: geometric mean {geometric_mean(times):.2f}, least {min(times):.2f}. "
            f"Our peak memory over its: geometric mean {geometric_mean(peaks):.2f}, most {max(peaks):.2f}."
        )
    built = "; ".join(f"{row['title']} {row['build']:.1f} s, {row['nodes']:,} nodes" for row in rows)
    print(f"Building the step: {built}.")
    for count, steps in ((1, "the first step"), (3, "the third")):
        pairs = [(v, row["losses"]["ours"]) for row in both for v in row["losses"].values()]
        apart = max((abs(a[count - 1] / b[count - 1] - 1) for a, b in pairs if min(len(a), len(b)) >= count), default=0)
        print(f"Losses of the sides in {steps}: at most {apart:.1e} of their value apart.")
    for row in rows:
        for n, reason in row["missing"].items():
            print(f"{row['title']}: {SIDES[n]} could not run it: {reason}")


# -- the program --------------------------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace) -> list[Row]:
    wanted = [name for name in SIDES if name not in arguments.without]
    if not arguments.compile:
        wanted = [name for name in wanted if name not in ("compile", "jax")]
    elif "compile" in wanted and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("torch.compile is left out: it needs a C++ compiler.", file=sys.stderr)
        wanted.remove("compile")
    for name in ("jax", "ort"):
        if name in wanted and arguments.optimizer != "sgd":
            print(f"{SIDES[name]} is left out: it is measured with plain SGD only.", file=sys.stderr)
            wanted.remove(name)
    environments = {"ort": "ort-training", "jax": "jax"}
    peers = {side: environment(name) if side in wanted else None for side, name in environments.items()}
    batch = arguments.batch or (2 if arguments.quick else 0)
    rows = []
    for name in announced(arguments.names or (OTHERS if arguments.others else NETWORKS)):
        with TemporaryDirectory() as folder:
            lowering, optimizer = arguments.lowering, arguments.optimizer
            facts = prepare(
                name,
                Path(folder),
                batch,
                arguments.size,
                ort=peers["ort"],
                optimizer=optimizer,
                lowering=lowering,
            )
            sides = commands(wanted, Path(folder), arguments.threads, peers)
            rows.append(measure(facts, sides, arguments.repeat))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    options = parser("steps", __doc__, "small batches, three repeats")
    names = f"of {', '.join(NETWORKS)} (all by default), {', '.join(OTHERS)}"
    options.add_argument("names", nargs="*", metavar="NETWORK", help=names)
    options.add_argument("--others", action="store_true", help="all of the latter")
    options.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sgd")
    options.add_argument("--compile", action="store_true", help="time torch.compile and jax.jit too")
    options.add_argument("--without", nargs="+", default=[], choices=list(SIDES), help="sides to leave out")
    options.add_argument("--batch", type=int, default=0)
    options.add_argument("--size", type=int, default=0, help="height and width of images")
    options.add_argument("--lowering", default="auto")
    carry_out(options, words, "steps", measured, print_steps, [*NETWORKS, *OTHERS])


if __name__ == "__main__":
    main()
