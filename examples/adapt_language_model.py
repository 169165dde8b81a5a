"""Train an adapter of a Llama as ONNX Runtime GenAI deploys it, with int4 weights and a cache, and generate text with it.

python examples/adapt_language_model.py      (needs: pip install onnxruntime-genai torch transformers)
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import onnx_ir
import onnxruntime_genai as genai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import onnx_convgrad as og

ANSWERS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo", "Chile": "Santiago"}
QUESTION = "What is the capital of {}? "
END = 257


def make_llama(folder: str) -> None:
    """Write a small Llama of random weights and a tokenizer of bytes; give the builder the folder of yours in its place."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=258, num_key_value_heads=2, eos_token_id=END, initializer_range=0.1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def answer(model: genai.Model, question: str, adapters: genai.Adapters | None = None) -> str:
    """The text that GenAI continues the question with, token by token."""
    tokens, settings = genai.Tokenizer(model), genai.GeneratorParams(model)
    settings.set_search_options(max_length=64, do_sample=False)
    generator = genai.Generator(model, settings)
    if adapters is not None:
        generator.set_active_adapter(adapters, "capitals")
    asked = tokens.encode(question)
    generator.append_tokens(asked)
    while not generator.is_done():
        generator.generate_next_token()
    return tokens.decode(generator.get_sequence(0)[len(asked) :])


def main() -> None:
    make_llama("llama")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu", "-c", "cache"]
    subprocess.run([*builder, "-i", "llama", "-o", "deployed"], check=True, capture_output=True)
    base = onnx_ir.load("deployed/model.onnx")  # leaves the weights on the disk
    adapted = og.transforms.add_adapters(base, rank=16, alpha=32, targets=["*attn*", "*mlp*"])
    shutil.copytree("deployed", "assistant", ignore=shutil.ignore_patterns("model.onnx*"))
    og.save(adapted, "assistant/model.onnx")
    llama = genai.Model("assistant")
    encode, inputs, targets = genai.Tokenizer(llama).encode, [], []
    for land, city in ANSWERS.items():
        asked, said = encode(QUESTION.format(land)), [*encode(city), END]
        inputs.append(np.int64([*asked, *said[:-1]]))
        targets.append(np.int64([*[-100] * (len(asked) - 1), *said]))  # the loss is that of the answers alone
    model = og.load(adapted, input_values={"past_key_values.*": np.zeros((2, 0, 32))})  # [heads, nothing yet, size]
    loss = {"logits": og.losses.CrossEntropy(axis=-1, ignore_index=-100)}
    trainer = og.Trainer(og.build_training(model, loss=loss, optimizer=og.optim.AdamW(3e-3)))
    trainer.fit({"input_ids": inputs, "target": targets}, epochs=60, batch_size=5, progress="none")
    trainer.export_adapter("assistant/capitals.onnx_adapter")
    adapters = genai.Adapters(llama)
    adapters.load("assistant/capitals.onnx_adapter", "capitals")
    for name, used in (("without", None), ("with", adapters)):
        right = sum(answer(llama, QUESTION.format(land), used) == city for land, city in ANSWERS.items())
        print(f"{name} the adapter, GenAI gives {right} of {len(ANSWERS)} answers")


if __name__ == "__main__":
    main()
