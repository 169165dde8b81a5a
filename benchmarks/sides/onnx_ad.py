"""onnx-ad, in an environment of its own: `python -m benchmarks.sides.onnx_ad MODEL RUNS` prints one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import onnx
import onnx_ad


def main(path: Path, runs: int) -> None:
    model = onnx.load(path)
    laps, nodes = [], 0
    for _ in range(runs):
        start = time.perf_counter()
        nodes = len(onnx_ad.reverse(model, layout="onnx").graph.node)
        laps.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(laps), "nodes": nodes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
