"""Command lines and files that cannot work, by what is wrong with them, and the words that the message must have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from PIL import Image

from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)


def classifier(classes: int = 3) -> onnx.ModelProto:
    """A classifier of images of 8x8 with the layers `conv` and `head`."""
    stored = {
        "conv.weight": RNG.standard_normal((4, 3, 3, 3)).astype("f"),
        "head.weight": RNG.standard_normal((4, classes)).astype("f"),
    }
    return graph_of(
        f"""(float[N,3,8,8] image) => (float[N,{classes}] y) {{ h = Conv (image, "conv.weight") r = Relu (h)
        p = GlobalAveragePool (r) f = Flatten (p) y = MatMul (f, "head.weight") }}""",
        **stored,
    )


def furnish(folder: Path) -> None:
    """Write models, images, arrays and tables, good and bad ones."""
    rng = np.random.default_rng(1)
    onnx.save(classifier(), folder / "model.onnx")
    onnx.save(graph_of("(float[N,4] x, int64 sr) => (float[N,2] y, float[N,2] z) { y = MatMul (x, w) z = Neg (y) }",
                       w=np.ones((4, 2), "f")), folder / "two.onnx")  # fmt: skip
    onnx.save(graph_of("(float[N,3,8,8] x) => (float[N,3] y) { p = GlobalAveragePool (x) y = Flatten (p) }"),
              folder / "bare.onnx")  # fmt: skip
    onnx.save(graph_of("(float[N,3,8,8] x) => (float[N,3] y) { p = GlobalMaxPool (x) f = Flatten (p) s = Sigmoid (f) "
                       "y = MatMul (s, w) q = Sigmoid (y) }", w=np.ones((3, 3), "f")), folder / "odd.onnx")  # fmt: skip
    fixed = graph_of("(float[7,3,8,8] image) => (float[7,3] y) { p = GlobalAveragePool (image) f = Flatten <axis = 1> (p) "
                     "c = Reshape (f, s) y = MatMul (c, w) }", w=np.ones((3, 3), "f"), s=np.array([7, 3]))  # fmt: skip
    onnx.save(fixed, folder / "fixed.onnx")
    whole = (folder / "model.onnx").read_bytes()
    (folder / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "text.onnx").write_text("This is not a model.")
    external = classifier()
    onnx.save(external, folder / "external.onnx", save_as_external_data=True, location="gone.data", size_threshold=0)
    (folder / "gone.data").unlink()
    unknown = helper.make_graph([helper.make_node("Magic", ["x"], ["y"], domain="my.domain")], "g",
                                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
                                [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])])  # fmt: skip
    onnx.save(helper.make_model(unknown, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("my.domain", 1)]),
              folder / "magic.onnx")  # fmt: skip
    for part in ("images", "split/train", "split/val", "five"):
        for name in ("a", "b", "c", *(("d", "e") if part == "five" else ())):
            (folder / part / name).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(folder / part / name / f"{i}.png")
    (folder / "nothing").mkdir()
    (folder / "flat").mkdir()
    Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(folder / "flat" / "0.png")
    (folder / "broken" / "a").mkdir(parents=True)
    (folder / "broken" / "a" / "0.png").write_bytes(b"no image")
    image, label = rng.standard_normal((6, 3, 8, 8)).astype("f"), np.arange(6) % 3
    hole = image.copy()
    hole[4, 0, 0, 0] = np.nan
    arrays: dict[str, dict[str, np.ndarray]] = {
        "data": {"image": image, "label": label},
        "alone": {"image": image},
        "uneven": {"image": image, "label": label[:4]},
        "hole": {"image": hole, "label": label},
        "ones": {"image": image, "label": label + 1},
        "minus": {"image": image, "label": label - 1},
        "words": {"image": image, "label": label.astype("U1")},
        "halves": {"image": image, "label": label + 0.5},
        "gray": {"image": image[:, :1], "label": label},
        "last": {"image": np.moveaxis(image, 1, -1), "label": label},
        "none": {"image": image[:0], "label": label[:0]},
        "number": {"image": np.float32(1), "label": np.int64(1)},
    }
    for name, members in arrays.items():
        np.savez(folder / f"{name}.npz", **members)  # type: ignore[arg-type]
    np.savez(folder / "pickled.npz", image=np.array([{"a": 1}], dtype=object))
    np.save(folder / "image.npy", image)
    (folder / "damaged.npz").write_bytes((folder / "data.npz").read_bytes()[:200])
    (folder / "data.txt2").write_text("1 2 3")
    (folder / "wrong.toml").write_text("epoch = 3\n")
    (folder / "damaged.toml").write_text("epochs = = 3\n")
    (folder / "kind.toml").write_text('epochs = "three"\n')
    (folder / "two.txt").write_text("x\ny\n")
    (folder / "rows.csv").write_text("flat/0.png,a,b\n")
    (folder / "gone.csv").write_text("file,text\nno.png,abc\n")


_T = "train model.onnx --data data.npz --loss cross_entropy"
_P = "predict model.onnx"
_E = "evaluate model.onnx"

BAD: dict[str, tuple[str, ...]] = {
    # files of models
    "inspect no.onnx": ("no.onnx",),
    "inspect images": ("images",),
    "inspect empty.onnx": ("empty.onnx",),
    "inspect text.onnx": ("text.onnx",),
    "inspect cut.onnx": ("cut.onnx",),
    "augment external.onnx": ("gone.data",),
    "train external.onnx --data data.npz --loss cross_entropy": ("gone.data",),
    "predict external.onnx data.npz": ("gone.data",),
    "augment magic.onnx": ("Magic",),
    "train magic.onnx --data data.npz --loss cross_entropy": ("Magic",),
    "predict magic.onnx data.npz": ("Magic",),
    "augment bare.onnx": ("parameters",),
    "train bare.onnx --data data.npz --loss cross_entropy": ("parameters",),
    # names in models
    "augment model.onnx --wrt conv.wieght": ("'conv.wieght'", "conv.weight"),
    "augment model.onnx --wrt nothing.*": ("nothing.*",),
    "augment model.onnx --of z": ("'z'", "y"),
    "augment model.onnx --wrt label": ("label",),
    "augment model.onnx --input-shape img:1,3,8,8": ("img", "image"),
    "augment model.onnx --input-shape image:1,3": ("image",),
    "augment model.onnx --input-shape image:a-b": ("--input-shape",),
    "augment model.onnx --input-value sr=1": ("sr",),
    "augment two.onnx --input-value sr": ("--input-value", "NAME=VALUE"),
    "augment two.onnx --input-value sr=loud": ("loud",),
    "augment two.onnx --input-value sr=1.5": ("sr", "int64"),
    "augment model.onnx --target gpu": ("gpu", "cuda"),
    "augment model.onnx --lowering ConvWeightGrad=fast": ("fast",),
    "augment model.onnx --max-workspace lots": ("lots", "256MB"),
    "augment model.onnx --limit node=3": ("node",),
    "augment model.onnx -o no/where/out.onnx": ("no/where",),
    "augment model.onnx --seed 1": ("seed",),
    "inspect model.onnx --depht 2": ("--depht", "--depth"),
    "inspect": ("MODEL",),
    "inspekt model.onnx": ("inspekt", "inspect"),
    # data of a training
    "train model.onnx": ("--data",),
    "train model.onnx --data data.npz": ("--loss",),
    "train --data data.npz": ("model", "ONNX"),
    "train model.onnx --data no.npz --loss cross_entropy": ("no.npz",),
    "train model.onnx --data nothing --loss cross_entropy": ("nothing", "images"),
    "train model.onnx --data split": ("split/train",),
    "train model.onnx --data broken": ("broken",),
    "train model.onnx --data flat": ("flat",),
    "train model.onnx --data data.txt2 --loss mse": ("data.txt2", ".npz"),
    "train model.onnx --data damaged.npz --loss mse": ("damaged.npz",),
    "train model.onnx --data pickled.npz --loss mse": ("pickled.npz", "bject"),
    "train model.onnx --data alone.npz --loss cross_entropy": ("target",),
    "train model.onnx --data uneven.npz --loss cross_entropy": ("6 samples", "4"),
    "train model.onnx --data hole.npz --loss cross_entropy": ("nan", "sample 4"),
    "train model.onnx --data ones.npz --loss cross_entropy --classes 3": ("3", "4"),
    "train model.onnx --data minus.npz --loss cross_entropy": ("-1", "out of range"),
    "train model.onnx --data words.npz --loss cross_entropy": ("label", "numbers"),
    "train model.onnx --data halves.npz --loss cross_entropy": ("0.5", "int64"),
    "train model.onnx --data gray.npz --loss cross_entropy": ("(6, 1, 8, 8)", "3, 8, 8"),
    "train model.onnx --data last.npz --loss cross_entropy": ("Transpose it with (0, 3, 1, 2)",),
    "train model.onnx --data none.npz --loss cross_entropy": ("no samples",),
    "train model.onnx --data number.npz --loss cross_entropy": ("single number",),
    "train model.onnx --data rows.csv": ("Row 1", "3 columns"),
    "train model.onnx --data gone.csv": ("Row 2", "no.png"),
    "train model.onnx --data images --validation five": ("'d'",),
    "train model.onnx --data images --validation 1.5": ("1.5",),
    "train model.onnx --data images --classes 2": ("--classes 2", "3 classes"),
    "train model.onnx --data images --labels two.txt": ("'a'",),
    "train model.onnx --data images --image-size big": ("--image-size",),
    "train model.onnx --data images --mean 0.5,0.5": ("mean", "2 numbers for 3 channels"),
    "train model.onnx --data images --std 0": ("std", "above 0"),
    "train model.onnx --data images --augment flop": ("flop", "flip"),
    f"{_T} --augment flip": ("--augment flip", "mixup"),
    f"{_T} --map imag=image": ("imag",),
    f"{_T} --map image": ("--map",),
    # options of a training
    f"{_T} --epochs 0": ("--epochs", "at least 1"),
    f"{_T} --epochs many": ("--epochs", "whole number"),
    f"{_T} --epoch 3": ("--epoch", "--epochs"),
    f"{_T} --batch-size some": ("--batch-size", "whole number"),
    "train fixed.onnx --data data.npz --loss cross_entropy --batch-size 7": ("6 samples make no batch of 7",),
    f"{_T} --lr -1": ("-1",),
    f"{_T} --lr nan": ("nan",),
    f"{_T} --optimizer adm": ("adm", "adam"),
    f"{_T} --optimizer-option beta=0.9": ("beta", "betas"),
    f"{_T} --momentum 0.9": ("--momentum", "adamw"),
    f"{_T} --schedule cosin": ("cosin", "cosine"),
    f"{_T} --schedule-option gama=1": ("gama",),
    f"{_T} --metric acuracy": ("acuracy", "accuracy"),
    f"{_T} --loss-option smoothing=0.1": ("smoothing", "label_smoothing"),
    f"{_T} --freeze cnv": ("cnv", "conv"),
    f"{_T} --freeze *": ("frozen", "nothing to train"),
    f"{_T} --unfreeze head": ("--unfreeze", "GLOB@EPOCH"),
    f"{_T} --ema 2": ("ema", "2"),
    f"{_T} --precision float8": ("float8", "float16"),
    f"{_T} --precision bfloat16": ("bfloat16", "cuda"),
    f"{_T} --providers gpu": ("gpu",),
    f"{_T} --head had": ("had", "head"),
    f"{_T} --teacher no.onnx": ("no.onnx",),
    f"{_T} --lora 0": ("--lora", "at least 1"),
    f"{_T} --lora-alpha 2": ("--lora",),
    f"{_T} --out images": ("images", "not a run"),
    f"{_T} --plot loss.doc": ("loss.doc", ".png"),
    f"{_T} --log history.xls": ("'.xls'", ".csv"),
    f"{_T} --config wrong.toml": ("epoch", "epochs"),
    f"{_T} --config damaged.toml": ("damaged.toml", "TOML"),
    f"{_T} --config kind.toml": ("epochs", "whole number"),
    "train --resume images": ("images", "not the folder of a run"),
    "train two.onnx --data data.npz --loss mse": ("2 floating outputs (y, z)", "--loss OUTPUT=NAME"),
    "train model.onnx --data data.npz --loss mse": ("label",),
    "train model.onnx --data data.npz --loss crossentropy": ("crossentropy", "cross_entropy"),
    "train model.onnx --data data.npz --loss y=cross_entropy --loss mse": ("mse", "OUTPUT=NAME"),
    "train model.onnx --data data.npz --loss ctc": ("ctc", "[N, T, classes]"),
    # prediction and evaluation
    _P: ("DATA",),
    f"{_P} no.png": ("no.png",),
    f"{_P} nothing": ("nothing",),
    f"{_P} flat": ("--mean", "--std"),
    f"{_P} flat data.npz": ("images and arrays",),
    f"{_P} data.npz --labels two.txt": ("2 labels", "3 classes"),
    f"{_P} data.npz --labels no.txt": ("no.txt",),
    f"{_P} data.npz --of z": ("'z'",),
    "predict two.onnx image.npy --of y": ("x", "sr"),
    f"{_P} data.npz --task class": ("class", "classes"),
    f"{_P} data.npz --task text": ("[N, T, classes]",),
    f"{_P} data.npz --top 0": ("--top",),
    f"{_P} data.npz -o out.xls": ("out.xls", ".csv"),
    f"{_P} data.npz --batch-size 0": ("batch_size",),
    f"{_P} data.npz --input-value sr=1": ("sr",),
    f"{_P} gray.npz": ("3, 8, 8",),
    f"{_P} flat --mean 0 --std 1 --image-size 9": ("height 8, not 9",),
    f"{_P} flat --mean x": ("--mean",),
    "predict two.onnx image.npy": ("2 floating outputs (y, z)", "--of"),
    "predict images flat": ("images", "not the folder of a run"),
    f"{_E} alone.npz": ("target",),
    f"{_E} flat --mean 0 --std 1": ("classes",),
    f"{_E} ones.npz": ("class 3", "3 classes"),
    f"{_E} words.npz": ("label", "numbers"),
    f"{_E} data.npz --map target=lable": ("lable", "label"),
    f"{_E} data.npz --plot matrix.doc": ("matrix.doc",),
    f"{_E} five --mean 0 --std 1": ("class",),
}
"""Command line -> what its message must have."""
