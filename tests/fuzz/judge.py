"""Apply a public function to one damaged model, and say what came of it."""

from __future__ import annotations

import os
import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from google.protobuf.message import Error as MessageError

import onnx_convgrad as og
from tests.fuzz.seeds import Arrays

ROOT = Path(og.__file__).resolve().parent
SECRET = b"LEAKED!!" * 512
LEAK = re.compile(b"LEAK|EAKE|AKED|KED!|ED!!|D!!L|!!LE|!LEA")  # one number of it is enough
HARMLESS = ("ok", "typed", "skipped")


def _train(model: Any, loss: str) -> Any:
    return og.build_training(model, loss=loss, optimizer=og.optim.SGD(0.1)).step


CALLS: dict[str, Callable[[Any], Any]] = {
    "augment inputs": lambda m: og.augment(m, wrt="inputs"),
    "augment all": lambda m: og.augment(m, wrt="all"),
    "augment parameters, recompute": lambda m: og.augment(m, memory=og.Memory(recompute="auto")),
    "augment all, training": lambda m: og.augment(m, wrt="all", training=True),
    "augment all, per sample": lambda m: og.augment(m, wrt="all", per_sample=True),
    "augment all, cuda": lambda m: og.augment(m, wrt="all", target="cuda"),
    "vjp": lambda m: og.vjp(m, wrt="all"),
    "jvp": lambda m: og.jvp(m, wrt="all", outputs=True),
    "explain": lambda m: str(og.explain(m, wrt="all")),
    "lower": og.transforms.lower_gradient_ops,
    "train mse": lambda m: _train(m, "mse"),
    "train cross_entropy": lambda m: _train(m, "cross_entropy"),
}
COMPARED = ("augment inputs", "augment all", "augment parameters, recompute", "jvp")
"""Calls whose results hold the original outputs, unchanged."""
RANDOM = re.compile(rb"Random|Bernoulli|Dropout|Multinomial")
FORMS = ("proto", "proto", "proto", "path", "path", "ir")


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its options, and the form of the model."""

    name: str
    form: str

    def __str__(self) -> str:
        return f"{self.name} ({self.form})"

    @classmethod
    def drawn(cls, r: random.Random) -> Call:
        names = list(CALLS)
        return cls(r.choices(names, [4, 4, 1, 1, 1, 1, 2, 2, 1, 1, 2, 1])[0], r.choice(FORMS))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a call: its kind, its place, and the words."""

    kind: str
    place: str = ""
    text: str = ""

    @property
    def find(self) -> bool:
        return not self.kind.startswith(HARMLESS)

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.place


def furnish(folder: Path) -> None:
    """Lay out files that external data may name; a secret lies where nothing may be read."""
    for name in ("model", "elsewhere", "model/folder"):
        (folder / name).mkdir()
    (folder / "model" / "weights.bin").write_bytes(bytes(4096))
    for name in ("secret.bin", "elsewhere/weights.bin", "elsewhere/model.onnx"):
        (folder / name).write_bytes(SECRET)
    (folder / "model" / "link.bin").symlink_to(folder / "secret.bin")
    os.mkfifo(folder / "model" / "pipe.bin")
    os.chdir(folder / "elsewhere")


def judge(data: bytes, call: Call, folder: Path, feeds: Arrays, phase: Callable[[str], None]) -> Verdict:
    """Apply the call to a serialized model; compare outputs where the result holds those of the model."""
    model: Any = folder / "model" / "model.onnx"
    model.write_bytes(data)
    phase("build")
    original: bytes | str = data if call.form == "proto" else os.fspath(model)
    try:
        if call.form != "path":
            model = onnx.load_from_string(data)
        if call.form == "ir":
            model = ir.from_proto(model)  # which leaves out what it does not represent
            original = ir.to_proto(model).SerializeToString()
    except MessageError:
        return Verdict("skipped", text="not a protobuf message")
    except Exception:  # noqa: BLE001 - the caller's own reading fails
        return Verdict("skipped", text="onnx_ir cannot read it")
    try:
        result = CALLS[call.name](model)
    except Exception as problem:  # noqa: BLE001 - what is thrown is the question
        return failure(problem)
    if call.form == "ir" and isinstance(result, ir.Model):
        result = ir.to_proto(result)
    if isinstance(result, onnx.ModelProto):
        if LEAK.search(result.SerializeToString()):
            return Verdict("leak", text="the result holds data from outside the folder")
        if call.name in COMPARED:
            return compare(original, result, feeds, phase)
    return Verdict("ok")


def failure(problem: BaseException) -> Verdict:
    """Typed errors are what was promised; one for lack of memory, or for a fault of ours, is not."""
    cause, text = problem.__cause__, " ".join(f"{problem}".split())[:300]
    if isinstance(problem, og.ConvGradError):
        if isinstance(cause, MemoryError):
            return Verdict("memory", place(cause), text)
        if isinstance(problem, og.errors.InternalError) and cause is not None:
            return Verdict(f"internal {type(cause).__name__}", place(cause), text)
        if isinstance(problem, (og.errors.InternalError, og.errors.RuleContractError)):
            return Verdict(type(problem).__name__, f"{place(problem)}: {gist(text)}", text)
        blamed = cause is not None and text.startswith("The model is not valid")
        after = f" after {type(cause).__name__}" if blamed else ""
        return Verdict(f"typed {type(problem).__name__}{after}", place(cause) if blamed else "", text)
    return Verdict(f"untyped {type(problem).__name__}", place(problem), text)


def place(problem: BaseException) -> str:
    """The innermost lines of this package."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename.startswith(str(ROOT))]
    own = [f for f in frames if not f.filename.endswith("boundary.py")]
    return f"{own[-1].filename.removeprefix(f'{ROOT}/')}:{own[-1].lineno} {own[-1].name}" if own else "the caller"


def gist(text: str) -> str:
    """The words of a message without names and numbers."""
    return re.sub(r"'[^']*'|\[[^]]*\]|\([^)]*\)|\S*[\d_]\S*", "~", text)[:70]


# -- Values ------------------------------------------------------------------------------------------------------------


def compare(model: bytes | str, result: onnx.ModelProto, feeds: Arrays, phase: Callable[[str], None]) -> Verdict:
    """Compare the outputs of a model with the same outputs of a result, bit for bit, if ONNX Runtime runs the model."""
    phase("original")
    try:
        original = _session(model)
        given = _operands(original, feeds)
        first, again = original.run(None, given), original.run(None, given)
    except Exception:  # noqa: BLE001 - any reason why the model does not run
        return Verdict("ok", text="does not run")
    names = [o.name for o in original.get_outputs()]
    if not _same(first, again) or len(set(names)) < len(names) or RANDOM.search(result.SerializeToString()):
        return Verdict("ok", text="random")
    if not all(map(_fits, original.get_outputs(), first)):
        return Verdict("ok", text="its outputs have not the shapes that it declares")
    phase("result")
    try:
        session = _session(result.SerializeToString())
        seeds = {
            f"{name}_grad": np.ones_like(y) for name, y in zip(names, first, strict=True) if not isinstance(y, list)
        }
        tangents = {f"{name}_tangent": np.ones_like(x) for name, x in given.items() if not isinstance(x, list)}
        wanted = [i.name for i in session.get_inputs()]
        every = _operands(session, {**feeds, **seeds, **tangents, **given})
        got = session.run([o.name for o in session.get_outputs()][: len(names)], {name: every[name] for name in wanted})
    except Exception as problem:  # noqa: BLE001 - any reason why the result does not run
        text = " ".join(f"{problem}".split())
        if "NOT_IMPLEMENTED" in text:
            return Verdict("ok", text="has no kernel")
        return Verdict("result fails", gist(text.split(" : ", 3)[-1]), text[:300])
    if _same(first, got):
        return Verdict("ok", text="compared")
    off = [name for name, a, b in zip(names, first, got, strict=True) if not _same(a, b)]
    makers = {name: node.op_type for node in result.graph.node for name in node.output}
    maker = makers.get(off[0], "an input")
    if all(map(_near, first, got)):  # an operator above opset 21 that becomes several
        return Verdict("ok", text=f"compared, rounding of {maker}")
    return Verdict("changed", f"output of {maker}", off[0])


def _session(model: bytes | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _operands(session: onnxruntime.InferenceSession, feeds: Arrays) -> dict[str, Any]:
    """Operands of the declared types; sizes with a name are 2.

    Raises:
        ValueError: An operand is larger than a million elements.
    """
    draw, operands = np.random.default_rng(0), {}
    for i in session.get_inputs():
        dtype = {"float": "float32", "double": "float64", "float16": "float16"}.get(i.type[7:-1], i.type[7:-1])
        if i.type == "tensor(string)":
            dtype = "object"
        given = feeds.get(i.name)
        if given is not None and given.dtype == dtype:
            operands[i.name] = given
            continue
        shape = [d if isinstance(d, int) else 2 for d in i.shape or ()]
        if np.prod(shape, dtype=float) > 10**6:
            raise ValueError(i.name)
        values = draw.standard_normal(shape) if "float" in dtype else draw.integers(0, 3, shape)
        operands[i.name] = values.astype(str).astype(object) if dtype == "object" else values.astype(dtype)
    return operands


def _fits(declared: Any, y: Any) -> bool:
    """Whether an output has its declared shape: the cotangent has that shape, too."""
    shape = declared.shape
    if not isinstance(y, np.ndarray) or shape is None:
        return True
    return len(shape) == y.ndim and all(not isinstance(d, int) or d == n for d, n in zip(shape, y.shape, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.array_equal(a, b, equal_nan=True) if a.dtype.kind in "fc" else np.array_equal(a, b)


def _near(a: Any, b: Any) -> bool:
    floats = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind == b.dtype.kind == "f"
    return _same(a, b) or (floats and a.shape == b.shape and np.allclose(a, b, 1e-2, 1e-3, equal_nan=True))
