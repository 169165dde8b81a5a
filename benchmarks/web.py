"""Training steps in WebAssembly against native ones, each on one thread.

python -m benchmarks.web                       # the digits network and ResNet-20
python -m benchmarks.web resnet20 --repeat 5

Needs Node.js and `onnxruntime-web`, which is taken from `NODE_PATH` or installed by npm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnx_convgrad as og
from benchmarks.networks import export, network
from benchmarks.program import Row, announced, carry_out, parser, table
from tests.support.node import packages

TITLES = {"digits": "digits, 8x8 pixels", "resnet20": "ResNet-20, 32x32 pixels"}
DIGITS = Path(__file__).parents[1] / "examples" / "models" / "digits_cnn.onnx"

SCRIPT = """
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const [folder, modules, count] = process.argv.slice(2);
const ort = createRequire(modules + "/")("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const feeds = {};
for (const [name, { type, shape, file }] of Object.entries(JSON.parse(readFileSync(`${folder}/feeds.json`)))) {
  const bytes = readFileSync(`${folder}/${file}`);
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  const kinds = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };
  feeds[name] = new ort.Tensor(type, new kinds[type](buffer), shape);
}
const session = await ort.InferenceSession.create(readFileSync(`${folder}/step.onnx`), { enableMemPattern: false });
const begin = performance.now();
while (performance.now() - begin < 2000) await session.run(feeds); // until V8 has compiled all kernels
const spent = [];
for (let i = 0; i < count; i++) {
  const start = performance.now();
  await session.run(feeds);
  spent.push((performance.now() - start) / 1000);
}
console.log(JSON.stringify(spent));
"""


def program(name: str, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The step of a training program for the web, and what it takes."""
    optimizer = og.optim.SGD(0.05, momentum=0.9)
    if name == "digits":
        draw = np.random.default_rng(0)
        model: onnx.ModelProto = onnx.load(DIGITS)
        data = {"image": draw.random((32, 1, 8, 8), np.float32), "target": draw.integers(0, 10, 32)}
    else:
        net = network(name)
        x, y = net.data(32)
        model, data = export(net.module(), x), {"x": x.numpy(), "target": y.numpy().astype(np.int64)}
    built = og.build_training(model, loss="cross_entropy", optimizer=optimizer, target="web", outputs=[])
    built.save(folder, defaults=False)
    initial = onnxruntime.InferenceSession(folder / "initial.onnx")
    names = [output.name for output in initial.get_outputs()]
    return onnx.load(folder / "step.onnx"), {**dict(zip(names, initial.run(None, {}), strict=True)), **data}


def native(step: onnx.ModelProto, feeds: dict[str, np.ndarray], count: int) -> list[float]:
    """Seconds of steps in ONNX Runtime's own library, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(step.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        session.run(None, feeds)
        spent.append(time.perf_counter() - start)
    return spent


def wasm(step: onnx.ModelProto, feeds: dict[str, np.ndarray], count: int) -> list[float]:
    """Seconds of steps in `onnxruntime-web` under Node.js, on one thread."""
    with tempfile.TemporaryDirectory() as name:
        folder, listed = Path(name), {}
        (folder / "step.onnx").write_bytes(step.SerializeToString())
        for i, (feed, value) in enumerate(feeds.items()):
            (folder / f"{i}.bin").write_bytes(np.ascontiguousarray(value).tobytes())
            listed[feed] = {"type": str(value.dtype), "shape": list(value.shape), "file": f"{i}.bin"}
        (folder / "feeds.json").write_text(json.dumps(listed))
        (folder / "run.mjs").write_text(SCRIPT)
        options = ["--no-liftoff"]  # V8 optimizes at the first call, not at some time during the measurement
        command = ["node", *options, str(folder / "run.mjs"), str(folder), str(packages("onnxruntime-web")), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return [float(s) for s in json.loads(done.stdout.splitlines()[-1])]


def measure(name: str, repeat: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        step, feeds = program(name, Path(folder))
    before, web, after = (side(step, feeds, repeat) for side in (native, wasm, native))
    spent = {"native": [*before, *after], "wasm": web}
    return {"title": TITLES[name], **{side: statistics.median(laps) for side, laps in spent.items()}}


def print_web(rows: Sequence[Row]) -> None:
    body = [
        [r["title"], f"{1e3 * r['native']:.1f}", f"{1e3 * r['wasm']:.1f}", f"{r['wasm'] / r['native']:.2f}"]
        for r in rows
    ]
    print(f"\n{table(['batch of 32', 'native ms', 'WebAssembly ms', 'ratio'], body)}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("web", __doc__, "three steps", timing=False)
    options.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(TITLES)}; all by default")
    options.add_argument("--repeat", type=int, default=20, help="steps of each side")

    def measured(arguments: argparse.Namespace) -> list[Row]:
        return [measure(name, arguments.repeat) for name in announced(arguments.names or list(TITLES))]

    carry_out(options, words, "web", measured, print_web, list(TITLES))


if __name__ == "__main__":
    main()
