"""Measure correctness and speed on a GPU in under eight minutes: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu                            # needs onnx-convgrad[cuda] and PyTorch for CUDA
    python -m benchmarks.gpu speed --only "convnext_tiny, batch 64, PyTorch" bfloat16
    python -m benchmarks.gpu --provider cpu --quick     # the same code with small sizes, without a GPU

Errors of gradients are relative to float64 on the CPU, those of layers and steps to PyTorch on the same device; pairs are
PyTorch / ours. Exit status: 0 done; 1 an error is above its limit, or a measurement failed; 2 the provider is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks.gpu.rows import Clock, Row, show
from onnx_convgrad.bench.timing import machine, machine_text
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.runtime.providers import PROVIDERS, check_available

PARTS = ("speed", "correctness")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of the table: {', '.join(PARTS)}")
    parser.add_argument("--provider", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, few of each kind")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="TEXT", help="measure rows whose name or type contains one of these"
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="start no measurement after this time")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that build the programs before the first measurement"
    )
    parser.add_argument(
        "--programs", type=Path, metavar="FOLDER", help="where --jobs builds programs, and looks for them first"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to a file")
    arguments = parser.parse_args(words)
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    try:
        check_available(import_runtime(), [PROVIDERS[arguments.provider]])
    except ConvGradError as problem:
        print(f"Nothing is measured: {problem}", file=sys.stderr)
        return 2
    from benchmarks.gpu import correctness, speed

    clock = Clock(arguments.minutes, arguments.only)
    builds = partial(speed.rows, jobs=arguments.jobs, programs=arguments.programs)
    rows: list[Row] = []
    for part, measure in (("speed", builds), ("correctness", correctness.rows)):
        if part in (arguments.parts or PARTS):
            for row in measure(arguments.provider, [arguments.provider], clock, quick=arguments.quick):
                print(f"{row.what} {row.precision}", file=sys.stderr, flush=True)
                rows.append(row)
    facts = machine(cores())
    if arguments.json:
        command = " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if words is None else words)])
        stored = {"table": "gpu", "command": command, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": facts}
        arguments.json.write_text(json.dumps({**stored, "rows": [asdict(row) for row in rows]}, indent=1))
    print(machine_text(facts))
    print(f"Provider: {arguments.provider}{_card(arguments.provider)}\n")
    print(show(rows))
    failed = sum(row.failed for row in rows)
    print(f"\n{len(rows)} rows, {failed} failed.")
    return 1 if failed else 0


def _card(provider: str) -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if provider == "cuda" and torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
