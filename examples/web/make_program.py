"""Write the program of the drawing page: the digits network with a new last layer for five symbols, which alone is trained.

From this folder: python make_program.py && python -m onnx_convgrad web program --page . --out site --port 8000
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx_convgrad as og

model = Path(__file__).parents[1] / "models" / "digits_cnn.onnx"
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "program")
program = og.build_training(
    og.transforms.replace_head(model, 5),
    loss="cross_entropy",
    optimizer=og.optim.Adam(0.02),
    wrt="fc.*",
    freeze_statistics=True,
    target="web",
)
program.save(folder)
print(f"{folder}: {program}")
