"""Teach Silero VAD, which finds speech, to find whistles: the file keeps a state, which is carried from frame to frame.

python examples/fine_tune_vad.py      (needs silero-vad, whose package has the file: pip install --no-deps silero-vad)
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

import onnx_convgrad as og

PACKAGE = find_spec("silero_vad")  # not imported: it needs PyTorch, and we need the file alone
if PACKAGE is None:
    raise ModuleNotFoundError("No module named 'silero_vad'")
FILE = Path(PACKAGE.origin or "").parent / "data" / "silero_vad.onnx"
RATE, HOP, PAST = 16000, 512, 64  # the file takes 512 new samples, behind the last 64 of the frame before
FRAMES = 48


def sounds(clips: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Whistles in noise [clips, samples], and the share of each frame in which there is a whistle [clips, FRAMES]."""
    length, generator = FRAMES * HOP, np.random.default_rng(seed)
    time = np.arange(length, dtype=np.float32) / RATE
    sound = generator.normal(0, generator.uniform(0.003, 0.03, (clips, 1)), (clips, length)).astype(np.float32)
    there = np.zeros((clips, length), np.float32)
    for clip in range(clips):
        start, lasting = generator.uniform(0.1, 0.8), generator.uniform(0.2, 0.7)
        pitch = generator.uniform(900, 2500) + 400 * np.sin(2 * np.pi * generator.uniform(0.5, 4) * time)
        there[clip] = (time > start) & (time < start + lasting)
        sound[clip] += there[clip] * generator.uniform(0.05, 0.3) * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    return sound, there.reshape(clips, FRAMES, HOP).mean(2)


def report(name: str, model: og.Model | str) -> None:
    sound, share = sounds(16, seed=1)
    output = og.predict(model, og.data.Sequences({"input": sound}, HOP, past=PAST)).outputs["output"]
    found, whistle, noise = output.reshape(share.shape) > 0.5, share > 0.9, share == 0
    print(f"{name:<7} finds {found[whistle].mean():6.1%} of the whistles, and {found[noise].mean():5.1%} of the noise")


def main() -> None:
    # the If on the sample rate leaves one branch; sizes that the file does not declare; what a frame takes from the last one
    shapes = {"input": ["N", PAST + HOP], "state": [2, "N", 128]}
    model = og.load(FILE, input_values={"sr": RATE}, input_shapes=shapes, states={"state": "stateN"})
    report("before:", model)
    sound, share = sounds(400, seed=0)
    clips = og.data.Sequences({"input": sound, "target": share}, {"input": HOP, "target": 1}, past={"input": PAST})
    layers = ["*encoder*", "*decoder*"]  # not the Fourier transform, which is a convolution of the file, too
    rate = og.schedules.Cosine(1e-3, 400 // 16 * FRAMES)
    program = og.build_training(model, loss="bce", optimizer=og.optim.Adam(rate), wrt=layers)
    trainer = og.Trainer(program)
    trainer.fit(clips, batch_size=16, progress="none")  # 16 clips side by side
    trainer.export("whistle_vad.onnx")  # with the input `sr` and the branch for 8 kHz, which is as it was
    report("after:", "whistle_vad.onnx")


if __name__ == "__main__":
    main()
