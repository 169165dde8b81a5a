"""Names that people try, and the names of this package: remedies for errors about unknown names.

People try the names of PyTorch, Keras and captum, and those of version 1.0.0rc1.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnx_convgrad.base.names import near_matches

ATTRIBUTES = {
    "CosineAnnealingLR": "schedules.Cosine",
    "DataLoader": "data.Arrays",
    "InferenceSession": "session",
    "L1Loss": "losses.L1",
    "LossScale": "MixedPrecision",
    "Mapper": "evaluation.Mapper",
    "ReduceLROnPlateau": "schedules.Plateau",
    "ReduceOnPlateau": "schedules.Plateau",
    "Report": "pipeline.report.Report",
    "SessionOptions": "runtime.SessionOptions",
    "TensorDataset": "data.Arrays",
    "add_lora": "transforms.add_adapters",
    "backward": "augment",
    "explainers": "attribution",
    "fit": "Trainer",
    "gradient": "augment",
    "gradients": "augment",
    "lora": "transforms.add_adapters",
    "saliency_map": "attribution.saliency",
    "train": "Trainer",
}
"""Name that is not in a module -> the name to use, in this package."""

KEYWORDS = {
    "activation_precision": ("memory", "memory=og.Memory(activations=...)"),
    "base_dir": ("model", "og.load(model, base_dir=...) as the model"),
    "class_weight": ("loss", "loss=og.losses.CrossEntropy(weight=og.data.class_weights(data))"),
    "deterministic": ("target", "target=og.Target('cpu', deterministic=...)"),
    "device": ("providers", "providers='cuda'"),
    "eps": ("epsilon", "epsilon=0.03"),
    "input_shapes": ("model", "og.load(model, input_shapes=...) as the model"),
    "input_values": ("model", "og.load(model, input_values=...) as the model"),
    "learning_rate": ("optimizer", "optimizer=og.optim.AdamW(0.001)"),
    "limits": ("model", "og.load(model, limits=...) as the model"),
    "loss_scale": ("precision", "precision=og.MixedPrecision('float16', init_scale=...)"),
    "lowering": ("target", "target=og.Target('cpu', lowering=...)"),
    "lr": ("optimizer", "optimizer=og.optim.AdamW(0.001)"),
    "master_weights": ("precision", "precision=og.MixedPrecision(master_weights=...)"),
    "max_workspace": ("target", "target=og.Target('cpu', max_workspace=...)"),
    "memory_budget": ("memory", "memory=0.5, or memory=og.Memory(budget=...)"),
    "n_steps": ("steps", "steps=50"),
    "num_classes": ("classes", "classes=3"),
    "provider": ("providers", "providers='cuda'"),
    "r": ("rank", "rank=8"),
    "recompute": ("memory", "memory=og.Memory(recompute=...)"),
    "sample_weight": ("loss", "loss=og.losses.CrossEntropy(sample_weight=True)"),
    "schedule": ("optimizer", "optimizer=og.optim.SGD(og.schedules.Cosine(0.1, steps=1000))"),
    "scheduler": ("optimizer", "optimizer=og.optim.SGD(og.schedules.Cosine(0.1, steps=1000))"),
    "seed": ("cotangents", "cotangents='ones'"),
    "trainable": ("freeze", "freeze=... for what is not trained, or wrt=... for what is"),
    "verbose": ("progress", "progress='none'"),
}
"""Unknown keyword -> the parameter that a function must have for the remedy, and the remedy."""

WORDS = {
    "--batch": "--batch-size",
    "--device": "--providers --provider",
    "--epsilon": "--stabilizer",
    "--gpu": "--providers --provider",
    "--learning-rate": "--lr",
    "--output": "--out --of",
    "--samples": "--directions --noisy-samples --samples-per-file",
    "--seed": "--cotangents",
    "--seed-value": "--seed",
    "--target": "--map",
    "export": "augment",
    "fine-tune": "train",
    "finetune": "train",
    "gradcam": "attribute",
    "grad-cam": "attribute",
    "gradient": "augment",
    "gradients": "augment",
    "resume": "train",
    "saliency": "attribute",
}
"""Unknown option or command -> those to use, as far as the command has them."""

PUBLIC = "attacks attribution callbacks curvature data errors functional losses metrics optim schedules transforms"


def no_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error for an attribute that a public module lacks; `names` are those that it has."""
    message = f"module {module!r} has no attribute {name!r}"
    here = module.removeprefix("onnx_convgrad").strip(".")
    others = [f"{other}.{name}" for other in PUBLIC.split() if other != here and name in _members(other)]
    elsewhere = [ATTRIBUTES[name]] if name in ATTRIBUTES else others
    near = [] if elsewhere else near_matches(name, names)
    remedy = f". Use {' or '.join(f'onnx_convgrad.{place}' for place in elsewhere)}." if elsewhere else ""
    return AttributeError(f"{message}{remedy}{_did_you_mean(near)}", name=name)


@cache
def _members(module: str) -> list[str]:
    """The names that a public module offers; it is not imported for them."""
    spec = find_spec(f"onnx_convgrad.{module}")
    text = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    found = re.search(r"^__all__ = (\[[^]]*\])", text, re.MULTILINE)
    return list(ast.literal_eval(found[1])) if found else []


def misfit(called: str, signature: inspect.Signature, given: Mapping[str, Any], reason: str) -> str:
    """The message of a call that does not fit a signature; `given` are the arguments by keyword."""
    taken = signature.parameters
    unknown = [name for name in given if name not in taken]
    if not unknown or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        by_name = [f"{p.name}=" for p in taken.values() if p.kind is p.KEYWORD_ONLY]
        if "too many positional" not in reason or not by_name:
            return f"{called}: {reason}"
        first = _listed(p.name for p in taken.values() if p.kind is not p.KEYWORD_ONLY)
        return f"{called}: {reason}. Give all but {first} by name: {', '.join(by_name)}"
    name = unknown[0]
    parameter, remedy = KEYWORDS.get(name, ("", ""))
    near = near_matches(name, [p for p in taken if p != "self"])
    hint = f". Use {remedy}." if parameter in taken else _did_you_mean(near) or f". It takes {_listed(taken)}."
    return f"{called}: got an unexpected keyword argument {name!r}{hint}"


def instead(message: str, known: Sequence[str]) -> str:
    """The message of a usage error, with the remedy if an option or a command is unknown; `known` are those there are."""
    for start in ("No such option: ", "No such command "):
        word = message.removeprefix(start).split()[0].strip("'.") if message.startswith(start) else ""
        places = [place for place in WORDS.get(word, "").split() if place in known]
        if places:
            return f"{message.partition(' (')[0].rstrip('.')}. Use {' or '.join(places)}."
    return message


def _did_you_mean(near: Sequence[str]) -> str:
    return f". Did you mean {', '.join(map(repr, near))}?" if near else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name for name in names if name != "self")
