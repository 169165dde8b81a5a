"""Make all tables of docs/performance*.md: `python -m benchmarks [--quick] [--threads N] [--json FOLDER]`.

Each is also a program: `python -m benchmarks.layers`, `.operators`, `.steps`, `.kernels`, `.memory`, `.build`,
`.per_sample`, `.functional`, `.trainer`, `.loader`, `.adapters`, `.precision` and `.quantization`. All take an hour and a
half, with `--quick` some minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    adapters,
    build,
    functional,
    kernels,
    layers,
    loader,
    memory,
    operators,
    per_sample,
    precision,
    quantization,
    steps,
    trainer,
)
from onnx_convgrad.lowering.cost.calibration import cores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few shapes, small batches, three repeats")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="also write the measurements to files in it")
    arguments = parser.parse_args()
    if arguments.json:
        arguments.json.mkdir(parents=True, exist_ok=True)
    quick = ["--quick"] if arguments.quick else []
    threads = ["--threads", str(arguments.threads)]
    for title, program, words in (
        ("Layers", layers, threads),
        ("Layers drawn at random", layers, [*threads, "--random", "100"]),
        ("Choice of lowerings", layers, [*threads, "--all"]),
        ("Operators", operators, threads),
        ("Training steps", steps, threads),
        ("Training steps of other networks", steps, [*threads, "--others", "--without", "ort"]),
        ("Kernels", kernels, threads),
        ("Memory budgets", memory, threads),
        ("Building", build, []),
        ("Gradients of each sample", per_sample, threads),
        ("Functional", functional, threads),
        ("Trainer", trainer, threads),
        ("Loader", loader, threads),
        ("Adapters", adapters, threads),
        ("Precision", precision, threads),
        ("Quantization", quantization, []),
    ):
        name = title.lower().replace(" ", "_")
        saving = ["--json", str(arguments.json / f"{name}.json")] if arguments.json else []
        print(f"\n## {title}\n", flush=True)
        program.main([*words, *quick, *saving])


if __name__ == "__main__":
    main()
