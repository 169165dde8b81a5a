"""The word error rate: counted by jiwer, or by a stand-in with its signature where it is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.data.alphabet import Alphabet, edit_distance
from onnx_convgrad.frontend.metadata import LABELS
from tests.support.one_input import graph_of

CHARACTERS = ("-", " ", "a", "b", "c")
ALPHABET = Alphabet(CHARACTERS)
WANTED = ["ab c", "a b a", "c", "b  b", "abc ab c b"]
PREDICTED = ["ab c", "a a", "", "b b", "ab c b b a"]
EDITS, WORDS = 0 + 1 + 1 + 0 + 3, 2 + 3 + 1 + 2 + 4


def process_words(reference: list[str], hypothesis: list[str]) -> Any:
    pairs = [(r.split(), h.split()) for r, h in zip(reference, hypothesis, strict=True)]
    edits = sum(edit_distance(r, h) for r, h in pairs)
    return SimpleNamespace(hits=sum(len(r) for r, _ in pairs) - edits, substitutions=edits, deletions=0, insertions=0)


@pytest.fixture(params=[pytest.param("jiwer", marks=pytest.mark.peers), "stand-in"], autouse=True)
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "jiwer", SimpleNamespace(process_words=process_words))
    elif find_spec("jiwer") is None:
        pytest.skip("jiwer is not installed")


def frames(text: str) -> np.ndarray:
    """Logits `[frames, 5]` whose best path is a text, with blanks between its characters."""
    path = [code for code in ALPHABET.encode(text, "here") for code in (code, 0)]
    return np.eye(5, dtype=np.float32)[path].reshape(-1, 5) * 5


def trainer(*, labels: bool = True) -> og.Trainer:
    net = graph_of("(float[N,T,5] x) => (float[N,T,5] y) { y = MatMul (x, w) }", w=np.eye(5, dtype=np.float32))
    if labels:
        entry = net.metadata_props.add()
        entry.key, entry.value = LABELS, '["-", " ", "a", "b", "c"]'
    return og.Trainer(og.build_training(net, loss="ctc", optimizer="sgd"))


BLANKS = np.eye(5, dtype=np.float32)[[0] * 22] * 5
DATA = {
    "x": [np.concatenate([frames(text), BLANKS])[:22] for text in PREDICTED],
    "target": [ALPHABET.encode(text, "here") for text in WANTED],
}


def test_errors_per_word_of_all_texts_together() -> None:
    found = trainer().evaluate(DATA, ["wer", "cer"], batch_size=2)
    assert found["wer"] == pytest.approx(EDITS / WORDS)
    history = trainer().fit(DATA, batch_size=3, metrics="wer", validation=DATA, progress="none")
    assert history[0]["val_wer"] == pytest.approx(EDITS / WORDS)


def test_characters_are_given_where_the_model_lacks_them() -> None:
    with pytest.raises(og.errors.ArgumentError, match=r"needs the characters by class.*WordErrorRate\(labels="):
        trainer(labels=False).evaluate(DATA, "wer")
    metric = og.metrics.WordErrorRate(labels=CHARACTERS[1:])
    assert trainer(labels=False).evaluate(DATA, metric)["wer"] == pytest.approx(EDITS / WORDS)


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(og.errors.ExecutionError, match=r"wer needs jiwer, which is not installed.*pip install jiwer"):
        trainer().evaluate(DATA, "wer")


def test_a_model_of_texts_alone(tmp_path: Path) -> None:
    net = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.zeros((3, 4), "f"))
    onnx.save(net, tmp_path / "m.onnx")
    program = og.build_training(tmp_path / "m.onnx", loss="cross_entropy", optimizer="sgd")
    with pytest.raises(og.errors.ArgumentError, match="The metric wer needs the loss ctc"):
        og.Trainer(program).evaluate({"x": np.zeros((2, 3), "f"), "target": [0, 1]}, "wer")
