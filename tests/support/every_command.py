"""A folder with all that commands read, and a command line of each command that ends with 0 in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from onnx_convgrad.cli.app import app
from onnx_convgrad.frontend.metadata import LABELS, PREPROCESSING, Preprocessing

NAMES = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
"""The names of all commands."""

TRAIN = "train model.onnx --data pictures --validation 0.5 --loss cross_entropy --epochs 1 --batch-size 2"
LINES = {
    "inspect": "inspect model.onnx -v",
    "augment": "augment model.onnx --wrt all --check",
    "explain": "explain model.onnx -v --placement --html explained.html",
    "view": "view model.onnx",
    "lower": "lower model.onnx",
    "check": "check model.onnx -v",
    "bench": "bench model.onnx --budget 1 --plot times.svg --save-lowerings fast.json",
    "train": f"{TRAIN} --metric f1,confusion --out run --plot run.svg",
    "predict": "predict run pictures -v -o labels.csv",
    "evaluate": "evaluate run pictures -v --plot confusion.svg -o classes.csv",
    "quantize": "quantize model.onnx --data pictures --test pictures --method nearest -v --plot layers.svg",
    "attribute": "attribute picture.png --model model.onnx -o map.svg",
    "map": "map model.onnx --data picture.png --data picture.png --samples-per-file 1 --workers 2 -o gradients",
    "web": "web run/program",
    "rules": "rules Conv",
}
"""Command -> the words of a command line; `train` comes before those that read its run."""


def furnish(folder: Path, named: Callable[[str], str] = str) -> None:
    """Write models and pictures into a folder. `named` changes every name inside a file, and those of the classes."""
    labels = [named("a"), named("b")]
    x, y, w, v, h, r, p, f = (named(name) for name in "x y w v h r p f".split())
    draw = np.random.default_rng(0)
    weights = {w: draw.standard_normal((4, 3, 3, 3)), v: draw.standard_normal((4, 2))}
    nodes = [
        helper.make_node("Conv", [x, w], [h], named("conv"), pads=[1, 1, 1, 1], doc_string=named("text")),
        helper.make_node("Relu", [h], [r], named("relu")),
        helper.make_node("GlobalAveragePool", [r], [p], named("pool")),
        helper.make_node("Flatten", [p], [f], named("flatten")),
        helper.make_node("MatMul", [f, v], [y], named("head")),
    ]
    inputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [named("N"), 3, 8, 8], named("text"))]
    outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, [named("N"), 2])]
    stored = [numpy_helper.from_array(array.astype("f"), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, named("graph"), inputs, outputs, stored, named("text"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model.producer_name, model.producer_version, model.domain = named("producer"), named("1"), named("domain")
    model.doc_string = named("text")
    texts = {
        LABELS: json.dumps(labels),
        PREPROCESSING: Preprocessing(size=(8, 8)).to_json(),
        named("key"): named("value"),
    }
    for key, value in texts.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, folder / "model.onnx")
    model.graph.node[0].attribute[0].ints[:] = [1, 1, 1]  # not valid
    model.graph.node.append(helper.make_node("Sinkhorn", [y], [named("z")], named("unknown"), domain=named("domain")))
    onnx.save(model, folder / "invalid.onnx")
    for label in labels:
        for number in range(2):
            file = folder / "pictures" / label / f"{named(str(number))}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8)).save(file)
    (folder / "pictures" / labels[0] / f"{named('broken')}.png").write_text("no picture", encoding="utf-8")
    Image.new("RGB", (8, 8)).save(folder / "picture.png")
