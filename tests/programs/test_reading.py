"""Losses on logits of models that end in Softmax or Sigmoid: the value before it is read, or the case is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad import losses
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 4)).astype(np.float32)
X, CLASSES, HOT = (
    RNG.standard_normal((5, 6)).astype("f"),
    RNG.integers(0, 4, 5),
    RNG.integers(0, 2, (5, 4)).astype("f"),
)


def model(text: str, opset: int = 17, **stored: np.ndarray) -> onnx.ModelProto:
    m = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')
    m.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in {"w": W, **stored}.items())
    return m


def head(after: str, **stored: np.ndarray) -> onnx.ModelProto:
    return model(f"(float[N,6] x) => (float[N,4] y) {{ z = MatMul(x, w) {after} }}", **stored)


def built(m: onnx.ModelProto, loss: Any) -> og.TrainingProgram:
    return og.build_training(m, loss=loss, optimizer=og.optim.SGD(0.1))


ENDINGS = {
    "softmax": head("y = Softmax<axis=1>(z)"),
    "negative": head("y = Softmax(z)"),
    "identity": head("s = Softmax(z) y = Identity(s)"),
    "cast": head("s = Softmax(z) h = Cast<to=11>(s) y = Cast<to=1>(h)"),
    "reshape": head("s = Softmax(z) y = Reshape(s, to)", to=np.array([-1, 4])),
    "positions": head(
        "u = Unsqueeze(z, at) v = Unsqueeze(u, at) s = Softmax<axis=1>(v) y = Flatten(s)", at=np.array([2])
    ),
    "squeezed": head("u = Unsqueeze(z, at) s = Softmax<axis=1>(u) y = Squeeze(s, at)", at=np.array([2])),
    "turned": head("t = Transpose<perm=[1,0]>(z) s = Softmax<axis=0>(t) y = Transpose<perm=[1,0]>(s)"),
    "old": model("(float[N,6] x) => (float[N,4] y) { z = MatMul(x, w) y = Softmax(z) }", opset=11),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_softmax(ending: str, name: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"'y' ends in Softmax, and the loss {name} takes .*: it reads .*, the value before"
    ):
        program = built(ENDINGS[ending], name)
    (term,) = program.manifest.losses
    assert (term["output"], term["target"]) == ("y", "target") and term["reads"] != "y"
    weight = torch.tensor(W, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(torch.tensor(X, dtype=torch.float64) @ weight, torch.tensor(CLASSES))
    loss.backward()
    trainer = og.Trainer(program)
    row = trainer.evaluate({"x": X, "target": CLASSES}, metrics=["accuracy"])
    right = float(((X @ W).argmax(1) == CLASSES).mean())
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5) and row["accuracy"] == pytest.approx(right)
    results = trainer.step({"x": X, "target": CLASSES})
    np.testing.assert_allclose(results["y"].sum(1), 1, rtol=1e-5)  # the output stays what users see
    np.testing.assert_allclose(trainer.parameters()["w"], W - 0.1 * weight.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_sigmoid() -> None:
    with pytest.warns(UserWarning, match="'y' ends in Sigmoid, and the loss bce_with_logits takes binary logits"):
        program = built(head("s = Sigmoid(z) y = Identity(s)"), "bce_with_logits")
    row = og.Trainer(program).evaluate({"x": X, "target": HOT}, metrics=["accuracy"])
    logits = torch.tensor(X @ W)
    assert row["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, torch.tensor(HOT)).item(), rel=1e-5)
    assert row["accuracy"] == pytest.approx(float(((X @ W > 0) == (HOT > 0.5)).mean()))


@pytest.mark.parametrize("loss", ["cross_entropy", losses.Focal()], ids=str)
def test_classes_behind_a_sigmoid(loss: Any) -> None:
    with pytest.warns(
        UserWarning, match="The model keeps its Sigmoid: the largest output is still the predicted class"
    ):
        assert built(head("y = Sigmoid(z)"), loss).manifest.losses[0]["reads"] == "z"


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "bce_with_logits"])
def test_logits_and_losses_of_any_numbers_are_read_as_they_are(loss: str) -> None:
    assert built(head("y = Identity(z)"), loss).manifest.losses[0]["reads"] == "y"
    assert built(head("y = LogSoftmax(z)"), "nll").manifest.losses[0]["reads"] == "y"
    assert built(head("y = Softmax(z)"), "mse").manifest.losses[0]["reads"] == "y"


def test_nll_of_logits_is_told() -> None:
    with pytest.warns(UserWarning, match="'y' comes right from a product with weights, as logits do"):
        built(model("(float[N,6] x) => (float[N,4] y) { y = MatMul(x, w) }"), "nll")


SEQUENCE = model("(float[N,T,6] x) => (float[N,T,4] y) { z = MatMul(x, w) y = Softmax<axis=2>(z) }")

REFUSED = [
    (head("y = Softmax(z)"), "bce_with_logits", r"makes its classes exclude.*loss=\{'z': ...\}, or --loss z=NAME"),
    (head("y = Sigmoid(z)"), "nll", "ends in Sigmoid. Use the loss bce_with_logits"),
    (SEQUENCE, "cross_entropy", r"axis 1. Give axis=-1: og.losses.CrossEntropy\(axis=-1\), or --loss-option axis=-1"),
    (model("(float[N,2,6] x) => (float[N,8] y) { z = MatMul(x, w) s = Softmax<axis=1>(z) y = Flatten(s) }"),
     "cross_entropy", r"may mix its classes.*To read a certain value anyway, name it: loss=\{'z': ...\}"),
    (head("y = Identity(z)"), losses.CrossEntropy(axis=2), "has 2 axes, and the loss has its classes along axis 2"),
]  # fmt: skip


@pytest.mark.parametrize(("m", "loss", "message"), REFUSED, ids=[m[:24] for _, _, m in REFUSED])
def test_what_does_not_fit_is_refused(m: onnx.ModelProto, loss: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        built(m, loss)


def test_the_remedy_works() -> None:
    program = built(head("y = Softmax(z)"), {"z": "bce_with_logits"})
    assert program.manifest.losses[0]["reads"] == "z"


@pytest.mark.filterwarnings("ignore:The output 'y' ends in Softmax")
def test_sequences() -> None:
    """Outputs [N, T, classes] with labels [N, T]."""
    x, target = RNG.standard_normal((5, 7, 6)).astype("f"), RNG.integers(0, 4, (5, 7))
    trainer = og.Trainer(built(SEQUENCE, losses.CrossEntropy(axis=-1, label_smoothing=0.1)))
    row = trainer.evaluate({"x": x, "target": target}, metrics=["accuracy"])
    logits = torch.tensor(x @ W).transpose(1, 2)
    want = F.cross_entropy(logits, torch.tensor(target), label_smoothing=0.1)
    assert row["loss"] == pytest.approx(want.item(), rel=1e-5)
    assert row["accuracy"] == pytest.approx(float(((x @ W).argmax(2) == target).mean()))


def test_misfitting_targets_name_the_axis() -> None:
    plain = model("(float[N,T,6] x) => (float[N,T,4] y) { y = MatMul(x, w) }")
    trainer = og.Trainer(built(plain, "cross_entropy"))
    with pytest.raises(ArgumentError, match=r"classes along axis 1 of the output.*CrossEntropy\(axis=-1\)"):
        trainer.step({"x": np.zeros((5, 7, 6), "f"), "target": np.zeros((5, 7), np.int64)})


@pytest.mark.filterwarnings("ignore:The output 'y' ends in Softmax")
def test_ctc_has_several_targets() -> None:
    program = built(SEQUENCE, losses.CTC(input_lengths=True))
    assert [t.name for t in program.manifest.targets] == ["target", "target_lengths", "target_input_lengths"]
    assert Manifest.from_json(program.manifest.to_json()) == program.manifest
    batch = {"x": RNG.standard_normal((3, 7, 6)).astype("f"), "target": np.array([[1, 2], [3, 0], [1, 1]]),
             "target_lengths": np.array([2, 1, 2]), "target_input_lengths": np.array([7, 5, 6])}  # fmt: skip
    trainer = og.Trainer(program)
    first = float(trainer.step(batch)["loss"])
    frames, lengths = (torch.tensor(batch[f"target_{n}"]) for n in ("input_lengths", "lengths"))
    chances = torch.tensor(batch["x"] @ W).log_softmax(2).transpose(0, 1)
    assert first == pytest.approx(F.ctc_loss(chances, torch.tensor(batch["target"]), frames, lengths).item(), rel=1e-5)
    for _ in range(20):
        last = float(trainer.step(batch)["loss"])
    assert last < first


@pytest.mark.filterwarnings("ignore:The output 'y' ends in Softmax")
def test_half_precision_reads_the_same_value() -> None:
    program = og.build_training(
        head("y = Softmax(z)"), loss="cross_entropy", optimizer=og.optim.SGD(0.1), precision="float16"
    )
    loss = og.Trainer(program).evaluate_batch({"x": X, "target": CLASSES})["loss"]
    assert float(loss) == pytest.approx(F.cross_entropy(torch.tensor(X @ W), torch.tensor(CLASSES)).item(), rel=1e-2)
