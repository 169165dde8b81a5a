"""Table (n): a training step of the adapters of a Llama, on an int4 and a float32 base, and PEFT's.

    python -m benchmarks.adapters             # 32 million parameters, four sequences of 128 tokens
    python -m benchmarks.adapters --quick     # a smaller Llama

Our sides train the files that the model builder of ONNX Runtime GenAI makes, PEFT the PyTorch module that they are made of:
in float32, and in the 4 bits of bitsandbytes (NF4, QLoRA). All sides adapt the same projections with AdamW. The peak of a
process includes Python and its libraries; the least seconds of a step are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.environments import environment
from benchmarks.program import Row, carry_out, parser, table
from benchmarks.steps import ROOT, measure

SIDES = {
    "ours": "ours, int4",
    "ours_float": "ours, float32",
    "peft": "PEFT, float32",
    "peft_4bit": "PEFT, NF4 of bitsandbytes",
}
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
BATCH, LENGTH = 4, 128


def measured(arguments: argparse.Namespace) -> list[Row]:
    python = environment("peft")
    if python is None:
        raise SystemExit("PEFT's environment, which makes the files, could not be made.")
    sizes = SMALL if arguments.quick else SIZES
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = {**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
        (folder / "plan.json").write_text(json.dumps({"config": config}))
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(sizes["vocab_size"], size=(BATCH, LENGTH + 1)))
        side = ["-m", "benchmarks.sides.adapter"]
        made = subprocess.run([python, *side, "prepare", folder], cwd=ROOT, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SystemExit(f"The Llama could not be made: {made.stderr.strip()}")
        facts = {**json.loads(made.stdout.splitlines()[-1]), "tokens": [BATCH, LENGTH], "missing": {}}
        pythons = {name: python if name.startswith("peft") else sys.executable for name in SIDES}
        words = [str(folder), str(arguments.threads)]
        row = measure(
            facts, {name: [str(where), *side, name, *words] for name, where in pythons.items()}, arguments.repeat
        )
    first = {name: losses[0] for name, losses in row["losses"].items()}
    if {"peft", "ours_float"} <= {*first}:  # the adapters change nothing yet
        assert abs(first["ours_float"] - first["peft"]) < 1e-4 * first["peft"], first
    return [row]


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        columns = ["side", "ms per step", "time / ours, int4", "peak, MB", "before the first step, MB"]
        body = []
        for name, title in SIDES.items():
            if name not in row["seconds"]:
                print(f"{title} is missing: {row['missing'][name]}")
                continue
            seconds, ours = row["seconds"][name], row["seconds"]["ours"]
            memory = (f"{row[kind][name] / 1e6:.0f}" for kind in ("peak", "loaded"))
            body.append([title, f"{1e3 * seconds:.0f}", f"{seconds / ours:.2f}", *memory])
        batch, length = row["tokens"]
        print(f"\nA Llama of {row['parameters'] / 1e6:.1f} million parameters, {batch} sequences of {length} tokens:")
        print(f"\n{table(columns, body)}\n")


def main(words: Sequence[str] | None = None) -> None:
    carry_out(parser("adapters", __doc__, "a small Llama, three repeats"), words, "adapters", measured, show)


if __name__ == "__main__":
    main()
