"""Compare gradients on the provider with float64 autograd on the CPU: every lowering, and every network of the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

import onnx_convgrad as og
from benchmarks.gpu.rows import Clock, Row
from onnx_convgrad.bench.layer import operands
from onnx_convgrad.bench.torch_side import torch_call
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.layer import conv_model
from onnx_convgrad.runtime import Providers, run

LIMIT = 1e-4
EXACT = {"tf32": False}

LAYERS = [
    ConvSpec.layer((4, 8, 14, 14), (8, 8, 3, 3), Window((1, 1), (1, 1), (1, 1), (1, 1), 1)),
    ConvSpec.layer((2, 6, 15, 13), (8, 6, 3, 3), Window((2, 2), (1, 1), (0, 1), (1, 0), 1)),
    ConvSpec.layer((2, 8, 17, 17), (8, 8, 3, 3), Window((1, 1), (2, 2), (2, 2), (2, 2), 1)),
    ConvSpec.layer((2, 8, 12, 12), (12, 4, 3, 3), Window((1, 1), (1, 1), (1, 1), (1, 1), 2)),
    ConvSpec.layer((2, 16, 14, 14), (16, 1, 3, 3), Window((1, 1), (1, 1), (1, 1), (1, 1), 16)),
    ConvSpec.layer((2, 16, 14, 14), (16, 1, 3, 3), Window((2, 2), (1, 1), (1, 1), (1, 1), 16)),
    ConvSpec.layer((3, 16, 9, 9), (8, 16, 1, 1), Window((1, 1), (1, 1), (0, 0), (0, 0), 1)),
    ConvSpec.layer((3, 6, 40), (8, 6, 5), Window((2,), (1,), (2,), (2,), 1)),
    ConvSpec.layer((1, 4, 6, 7, 8), (4, 4, 3, 3, 3), Window((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)),
]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """L2 distance, relative to the norm of `want`."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / max(np.linalg.norm(want), 1e-30))


def wanted(layer: ConvSpec) -> dict[str, np.ndarray]:
    """Gradients of x and w by PyTorch in float64."""
    tensors = {name: torch.from_numpy(array).double() for name, array in operands(layer).items()}
    return {name: g.numpy() for name, g in zip("xw", torch_call(layer, ["x", "w"], tensors)(), strict=True)}


def check_lowering(operator: str, name: str, layers: Sequence[ConvSpec], target: str, providers: Providers) -> Row:
    """The largest error of one lowering over the layers to which it applies."""
    operand = {"ConvInputGrad": "x", "ConvWeightGrad": "w"}[operator]
    errors = []
    for layer in layers:
        try:
            model = og.vjp(conv_model(layer), wrt=[operand], target=og.Target(target, lowering={operator: name}))
        except og.errors.LoweringError:
            continue
        feed = {v.name: operands(layer)[v.name] for v in model.graph.inputs}
        got = run(model, feed, providers=providers, options=EXACT)[f"{operand}_grad"]
        errors.append(relative(got, wanted(layer)[operand]))
    applies = f"{len(errors)} of {len(layers)} layers"
    return Row(what=f"{operator} by {name}", error=max(errors, default=None), limit=LIMIT, note=applies)


def check_family(name: str, target: str, providers: Providers) -> Row:
    """The largest error of a gradient of a network in training mode; the limit follows PyTorch's own float32 error."""
    from tests.support import families

    family = next(f for f in families.FAMILIES if f.name == name)
    module, x = family.build().train(), family.example()
    proto = families.export(module, x, dynamo=False, training=True)
    with torch.no_grad():
        shape = tuple(family.build().train()(x).shape)
    seed = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = families.reference_gradients(module, x, seed)
    single = families.float32_gradients(module, x, seed)
    model = og.augment(proto, wrt="all", target=target)
    got = run(model, {"x": x.numpy(), "y_grad": seed}, providers=providers, options=EXACT)
    pairs = {"x": ("x", "none"), **families.match_parameters(proto, module)}
    worst, limit = 0.0, 1e-3
    for value, (parameter, transform) in pairs.items():
        if parameter in family.null_in_training:
            continue
        gradient = got[f"{value}_grad"]
        error = relative(gradient.T if transform == "transpose" else gradient, want[parameter])
        if error >= worst:
            worst, limit = error, max(1e-3, 5 * relative(single[parameter], want[parameter]))
    return Row(what=f"{name}, gradients", error=worst, limit=limit, note=f"{len(pairs)} values")


def rows(target: str, providers: Providers, clock: Clock, *, quick: bool) -> Iterator[Row]:
    """Lowerings, then networks."""
    layers = LAYERS[1:6:2] if quick else LAYERS
    for operator in ("ConvInputGrad", "ConvWeightGrad"):
        for name in lowerings()[operator]:
            title = f"{operator} by {name}"
            yield from clock.row(title, "float32", check_lowering, operator, name, layers, target, providers)
    from tests.support.families import FAMILIES

    for family in FAMILIES[:2] if quick else FAMILIES:
        yield from clock.row(f"{family.name}, gradients", "float32", check_family, family.name, target, providers)
