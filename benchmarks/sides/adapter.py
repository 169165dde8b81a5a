"""The sides of the adapter benchmark: one process each.

    python -m benchmarks.sides.adapter prepare FOLDER     # a Llama, and two files that GenAI's builder makes of it
    python -m benchmarks.sides.adapter ours|ours_float|peft|peft_4bit FOLDER THREADS

The protocol is that of `benchmarks.sides.train`. Every side imports only what it measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sides.train import Step, serve

RANK, ALPHA, RATE = 8, 16, 1e-3
FILES = {"ours": "int4", "ours_float": "fp32"}
"""Our sides, and the precision of the file that each trains."""


def prepare(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    plan = json.loads((folder / "plan.json").read_text())
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**plan["config"]))
    module.save_pretrained(folder / "llama")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder / "llama")
    builder = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        folder / "llama",
        "-e",
        "cpu",
        "-c",
        folder,
    ]
    for precision in FILES.values():
        words = ["-o", folder / precision, "-p", precision, "--extra_options", "fuse_qkv=false"]
        subprocess.run([*map(str, [*builder, *words])], check=True)
    print(json.dumps({"parameters": sum(p.numel() for p in module.parameters())}))


def ours(file: Path, tokens: np.ndarray, threads: int) -> Step:
    import onnx_ir

    import onnx_convgrad as og

    model = og.transforms.add_adapters(onnx_ir.load(file), rank=RANK, alpha=ALPHA, targets=["*attn*", "*mlp*"])
    sizes = json.loads((file.parent / "genai_config.json").read_text())["model"]["decoder"]
    empty = np.zeros((sizes["num_key_value_heads"], 0, sizes["head_size"]))
    loaded = og.load(model, input_values={"past_key_values.*": empty})
    loss = {"logits": og.losses.CrossEntropy(axis=-1, ignore_index=-100)}
    trainer = og.Trainer(
        og.build_training(loaded, loss=loss, optimizer=og.optim.AdamW(RATE)), options={"threads": threads}
    )
    inputs, target = tokens[:, :-1], tokens[:, 1:]
    batch = {"input_ids": inputs, "attention_mask": np.ones_like(inputs), "target": target}
    return lambda: float(trainer.step(batch)["loss"])


def peft(folder: Path, tokens: np.ndarray, threads: int, *, four_bits: bool) -> Step:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    settings: dict[str, Any] = {"dtype": torch.float32}
    if four_bits:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    module = LlamaForCausalLM.from_pretrained(folder / "llama", **settings)
    module = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    moving = [p for p in module.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, RATE)
    words = torch.from_numpy(tokens)
    inputs, target = words[:, :-1], words[:, 1:]
    mask = torch.ones_like(inputs)

    def step() -> float:
        optimizer.zero_grad()
        logits = module(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main(side: str, folder: Path, threads: int) -> None:
    tokens = np.load(folder / "tokens.npy")
    if side in FILES:
        serve(ours(folder / FILES[side] / "model.onnx", tokens, threads))
    else:
        serve(peft(folder, tokens, threads, four_bits=side == "peft_4bit"))


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
