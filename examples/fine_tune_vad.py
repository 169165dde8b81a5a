"""Teach Silero VAD, which finds speech, to find whistles: the file keeps a state, which is fed from frame to frame.

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
FRAMES, CLIPS, ROUNDS = 48, 16, 25


def sounds(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Frames [FRAMES, CLIPS, 576] of whistles in noise, and the share of each frame in which there is a whistle."""
    length = FRAMES * HOP
    time = np.arange(length) / RATE
    sound = generator.normal(0, generator.uniform(0.003, 0.03, (CLIPS, 1)), (CLIPS, length))
    there = np.zeros((CLIPS, length))
    for clip in range(CLIPS):
        start, lasting = generator.uniform(0.1, 0.8), generator.uniform(0.2, 0.7)
        pitch = generator.uniform(900, 2500) + 400 * np.sin(2 * np.pi * generator.uniform(0.5, 4) * time)
        there[clip] = (time > start) & (time < start + lasting)
        sound[clip] += there[clip] * generator.uniform(0.05, 0.3) * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    padded = np.pad(sound, [(0, 0), (PAST, 0)]).astype(np.float32)
    frames = np.stack([padded[:, t * HOP : t * HOP + PAST + HOP] for t in range(FRAMES)])
    return frames, there.reshape(CLIPS, FRAMES, HOP).mean(2).T


def listen(session: object, frames: np.ndarray) -> np.ndarray:
    """The file's probabilities [FRAMES, CLIPS], frame by frame, as in use."""
    state, found = np.zeros((2, CLIPS, 128), np.float32), []
    for frame in frames:
        output, state = session.run(None, {"input": frame, "state": state, "sr": np.array(RATE)})  # type: ignore[attr-defined]
        found.append(output[:, 0])
    return np.array(found)


def report(name: str, path: Path | str, frames: np.ndarray, share: np.ndarray) -> None:
    found, whistle, noise = listen(og.session(path), frames) > 0.5, share > 0.9, share == 0
    print(f"{name:<7} finds {found[whistle].mean():6.1%} of the whistles, and {found[noise].mean():5.1%} of the noise")


def main() -> None:
    test = sounds(np.random.default_rng(1))
    report("before:", FILE, *test)
    # the If on the sample rate leaves one branch; sizes that the file does not declare
    shapes = {"input": ["N", PAST + HOP], "state": [2, "N", 128]}
    model = og.load(FILE, input_values={"sr": RATE}, input_shapes=shapes)
    rate = og.schedules.Cosine(1e-3, ROUNDS * FRAMES)
    layers = ["*encoder*", "*decoder*"]  # not the Fourier transform, which is a convolution of the file, too
    program = og.build_training(model, loss={"output": "bce"}, optimizer=og.optim.Adam(rate), wrt=layers)
    trainer, generator = og.Trainer(program), np.random.default_rng(0)
    for _ in range(ROUNDS):
        state = np.zeros((2, CLIPS, 128), np.float32)
        for frame, share in zip(*sounds(generator), strict=True):
            batch = {"input": frame, "state": state, "target": share[:, None].astype(np.float32)}
            state = trainer.step(batch)["stateN"]
    trainer.export("whistle_vad.onnx")  # with the input `sr` and the branch for 8 kHz, which is as it was
    report("after:", "whistle_vad.onnx", *test)


if __name__ == "__main__":
    main()
