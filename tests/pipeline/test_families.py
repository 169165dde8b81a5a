"""Whole networks, exported by PyTorch's two exporters, against float64 autograd of the module itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import (
    FAMILIES,
    Family,
    export,
    exported,
    float32_gradients,
    keeps_mode,
    match_parameters,
    reference_gradients,
)
from tests.support.training_nets import off

QUICK = ("ts-eval",)
BY_NAME = {family.name: family for family in FAMILIES}


def _variants() -> list[Any]:
    """Every family: both exporters folded, TorchScript unfolded in evaluation and in training mode, dynamic sizes."""
    variants = {
        "ts-eval": {"dynamo": False, "training": False},
        "ts-unfolded": {"dynamo": False, "training": False, "fold": False},
        "ts-train": {"dynamo": False, "training": True},
        "dynamo-eval": {"dynamo": True, "training": False},
        "ts-train-dynamic": {"dynamo": False, "training": True, "dynamic_batch": True},
        "dynamo-eval-dynamic": {"dynamo": True, "training": False, "dynamic_batch": True},
    }
    return [
        pytest.param(family.name, options, id=f"{family.name}-{name}", marks=() if name in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for name, options in variants.items()
    ]


@lru_cache(maxsize=4)
def _references(name: str, training: bool) -> tuple[torch.nn.Module, torch.Tensor, np.ndarray, np.ndarray, dict, dict]:
    family = BY_NAME[name]
    module = family.build().train(training)
    x = family.example()
    with torch.no_grad():
        y = family.build().train(training)(x).numpy()
    seed = np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
    want, single = reference_gradients(module, x, seed), float32_gradients(module, x, seed)
    for parameter, gradient in want.items():  # every gradient counts, and float32 has digits of it
        size = np.abs(gradient).max()
        null = training and parameter in family.null_in_training
        assert size < 1e-12 if null else size > 5e-4 and np.abs(single[parameter] - gradient).max() < 5e-4 * size
    return module, x, y, seed, want, single


def _assert_close(got: np.ndarray, want: np.ndarray, float32: np.ndarray, name: str) -> None:
    limit = max(1e-3, 5 * off(float32, want))
    assert off(got, want) <= limit, f"{name}: off by {off(got, want):.1e}, allowed {limit:.1e}"


def _assert_parameters_close(
    result: dict[str, np.ndarray], matched: Any, want: dict[str, np.ndarray], float32: dict[str, np.ndarray]
) -> None:
    for initializer, (parameter, transform) in matched.items():
        got = result[f"{initializer}_grad"]
        _assert_close(got.T if transform == "transpose" else got, want[parameter], float32[parameter], parameter)


@pytest.mark.filterwarnings("ignore:The exporter folded BatchNormalizations")
@pytest.mark.filterwarnings("ignore:The exporter computed 'expand' from 'cls_token'")  # for each sample of a batch
@pytest.mark.parametrize(("name", "options"), _variants())
def test_gradients_equal_autograd(name: str, options: dict[str, bool]) -> None:
    family: Family = BY_NAME[name]
    module, x, y, seed, want, single = _references(name, options["training"])
    proto = exported(family, **options)
    assert keeps_mode(module, dynamo=options["dynamo"], training=options["training"])
    augmented = og.augment(proto, wrt="all")
    result = run(augmented, {"x": x.numpy(), "y_grad": seed})
    for plain in (run(proto, {"x": x.numpy()})["y"], y):
        np.testing.assert_allclose(result["y"], plain, rtol=1e-4, atol=1e-4)
    _assert_close(result["x_grad"], want["x"], single["x"], "x")
    matched = match_parameters(proto, module)
    null = family.null_in_training if options["training"] else ()
    scale = max(float(np.abs(v).max()) for v in want.values())
    for initializer in (i for i, (parameter, _) in matched.items() if parameter in null):
        assert float(np.abs(result[f"{initializer}_grad"]).max()) < 1e-5 * scale
    _assert_parameters_close(result, {i: m for i, m in matched.items() if m[0] not in null}, want, single)
    if not options.get("fold", True) or options["training"]:
        assert {p for p, _ in matched.values()} == set(dict(module.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet_basic", "unet", "deeplab", "audio1d"])
def test_one_file_serves_every_size(name: str) -> None:
    family = BY_NAME[name]
    module = family.build().eval()
    x = family.example()
    proto = export(module, x, dynamo=False, training=False, fold=False, dynamic_batch=True, dynamic_spatial=True)
    augmented = og.augment(proto, wrt="all")
    for batch, grow in ((1, 0), (3, 16)):
        bigger = torch.randn(
            batch, x.shape[1], *(s + grow for s in x.shape[2:]), generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            shape = module(bigger).shape
        seed = np.random.default_rng(0).standard_normal(tuple(shape)).astype(np.float32)
        want, single = reference_gradients(module, bigger, seed), float32_gradients(module, bigger, seed)
        result = run(augmented, {"x": bigger.numpy(), "y_grad": seed})
        _assert_close(result["x_grad"], want["x"], single["x"], "x")
        _assert_parameters_close(result, match_parameters(proto, module), want, single)


def test_training_option_equals_a_training_export() -> None:
    """`training=True` on an evaluation export gives the gradients of training mode, and updated statistics."""
    family = BY_NAME["resnet_basic"]
    module = family.build().train()
    x = family.example()
    proto = exported(family, dynamo=False, training=False, fold=False)
    augmented = og.augment(proto, wrt="all", training=True)
    seed = np.random.default_rng(0).standard_normal(run(proto, {"x": x.numpy()})["y"].shape)
    result = run(augmented, {"x": x.numpy(), "y_grad": seed.astype(np.float32)})
    want, single = reference_gradients(module, x, seed), float32_gradients(module, x, seed)
    _assert_close(result["x_grad"], want["x"], single["x"], "x")
    _assert_parameters_close(result, match_parameters(proto, module), want, single)
    statistics = [n for n in result if n.endswith("_next")]
    assert len(statistics) == 2 * sum(isinstance(m, torch.nn.BatchNorm2d) for m in module.modules())
