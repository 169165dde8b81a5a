"""Gradients per sample against PyTorch's and against a loop over the samples."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper, parser
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export, match_parameters

Arrays = dict[str, np.ndarray]


def wanted(module: nn.Module, x: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """PyTorch's gradient of `sum(seed[n] * module(x[n]))` for each sample n, in float64."""
    module = module.double()

    def score(parameters: dict[str, Tensor], xs: Tensor, seeds: Tensor) -> Tensor:
        return (functional_call(module, parameters, (xs[None],))[0] * seeds).sum()

    if any(isinstance(part, nn.RNNBase) for part in module.modules()):  # vmap cannot run them
        names, values = zip(*module.named_parameters(), strict=True)
        pairs = zip(x.double(), seed.double(), strict=True)
        rows = [torch.autograd.grad(score(dict(zip(names, values, strict=True)), *pair), values) for pair in pairs]
        return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap warns about slow operators
        return vmap(grad(score), (None, 0, 0))(dict(module.named_parameters()), x.double(), seed.double())


def compare(module: nn.Module, x: Tensor, *, dynamo: bool = False, dynamic: bool = True, least: int = 1) -> None:
    """Compare gradients, their sum and their squared norms with PyTorch's."""
    module.eval()
    proto = export(module, x, dynamo=dynamo, training=False, dynamic_batch=dynamic, fold=dynamo)
    pairs = match_parameters(proto, module)
    assert len(pairs) >= least
    with torch.no_grad():
        seed = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(1))
    feed = {"x": x.numpy(), "y_grad": seed.numpy()}
    each = run(og.augment(proto, wrt=list(pairs), per_sample=True), feed)
    total = run(og.augment(proto, wrt=list(pairs)), feed)
    norms = run(og.augment(proto, wrt=list(pairs), per_sample="squared_norm"), feed)
    oracle = {name: g.detach() for name, g in wanted(module, x, seed).items()}
    top = max(float(g.norm()) for g in oracle.values())
    for name, (torch_name, transform) in pairs.items():
        want = oracle[torch_name].numpy()
        want = want.swapaxes(1, 2) if transform == "transpose" else want
        close(each[f"{name}_grad"], want, 1e-5 * top, name)
        close(each[f"{name}_grad"].sum(0), total[f"{name}_grad"], 1e-5 * top, name)
        squares = (want.reshape(len(want), -1) ** 2).sum(1)
        close(norms[f"{name}_grad_squared_norm"], squares, 1e-6 * top**2, name)


def close(got: np.ndarray, want: np.ndarray, floor: float, name: str, bound: float = 2e-5) -> None:
    assert got.shape == want.shape, name
    assert np.linalg.norm(got - want) <= bound * max(float(np.linalg.norm(want)), floor), name


def spread(module: nn.Module) -> nn.Module:
    """Change all tensors of a module so that no two are equal and none has a neutral value."""
    torch.manual_seed(0)
    for t in (*module.parameters(), *module.buffers()):
        if t.is_floating_point():
            t.data = t.data + 0.2 + 0.2 * torch.rand_like(t)
    return module


def model(text: str, **weights: Any) -> onnx.ModelProto:
    """A model from ONNX's text form, with additional weights."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    for name, value in weights.items():
        array = np.asarray(value)
        array = array if array.dtype == np.int64 else array.astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto)
    return proto


def looped(proto: onnx.ModelProto, feed: Arrays, **arguments: Any) -> Arrays:
    """The ordinary gradient of each sample, stacked."""
    single = og.augment(proto, **arguments)
    count = len(next(iter(feed.values())))
    rows = [run(single, {name: v[i : i + 1] for name, v in feed.items()}) for i in range(count)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0] if name.endswith("_grad")}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
