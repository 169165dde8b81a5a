"""The miniature networks of the zoo with random parameters, their exports to ONNX, and reference gradients.

At their size a float64 reference gradient costs milliseconds. Parameters are randomized so that no two tensors are equal
and none has a neutral value such as a scale of one, which would hide a missing term.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from tests.support.zoo import branches, images, residual, separable, signals, tokens

EXPORTS = "ONNX_CONVGRAD_TEST_EXPORTS"
"""The environment variable with the folder of exported networks of a test run."""


@dataclass(frozen=True)
class Family:
    """One network and the shape of its input.

    `null_in_training` lists the parameters whose gradient is zero with batch statistics: a shift that only reaches
    another batch normalization through a pointwise convolution is subtracted again.
    """

    name: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    null_in_training: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The network with the parameters of its name."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(map(ord, self.name)))
            module = self.make()
            _randomize(module, torch.randn(8, *self.input_shape[1:]))
        return module

    def example(self, seed: int = 0) -> Tensor:
        """A standard normal input; the global generator is not used."""
        return torch.randn(self.input_shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------------------------
# Assembly


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _randomize(module: nn.Module, example: Tensor) -> None:
    """Move every parameter off its neutral value, and perturb the statistics of one batch for batch normalization.

    Activations keep a moderate size in evaluation mode, yet confusing batch and running statistics changes the result.
    """
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORMS)]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() == max(parameter.shape, default=1):
                center = 1.0 if bool((parameter == 1).all()) else 0.0
                parameter.copy_(center + torch.empty_like(parameter).uniform_(-0.4, 0.4))
            elif bool((parameter == parameter.flatten()[0]).all()):
                parameter.normal_(0.0, 0.4)
        for norm in norms:
            norm.momentum = 1.0
        module.train()(example)
        for norm in norms:
            norm.momentum = 0.1
            mean, var = norm.running_mean, norm.running_var
            assert mean is not None and var is not None
            mean.add_(var.sqrt() * torch.empty_like(mean).uniform_(-0.5, 0.5))
            var.mul_(torch.empty_like(var).uniform_(0.6, 1.6))
    module.eval()


_SHIFTED = (
    *(f"stage.0.branch{path}.1.bias" for path in ("1.0", "2.1")),
    *(f"stage.{i}.branch2.1.1.bias" for i in (1, 2)),
)

FAMILIES: tuple[Family, ...] = (
    Family("resnet_basic", residual.resnet_basic_mini, (2, 3, 33, 33)),
    Family("resnet_bottleneck", residual.resnet_bottleneck_mini, (2, 3, 32, 32)),
    Family("resnext", residual.resnext_mini, (2, 3, 33, 33)),
    Family("densenet", branches.densenet_mini, (2, 3, 33, 33)),
    Family("mobilenet_v3", separable.mobilenet_v3_mini, (2, 3, 24, 24)),
    Family("efficientnet", separable.efficientnet_mini, (2, 3, 24, 24)),
    Family("shufflenet_v2", separable.shufflenet_mini, (2, 3, 32, 32), _SHIFTED),
    Family("inception", branches.inception_mini, (2, 3, 25, 25)),
    Family("convnext", tokens.convnext_mini, (2, 3, 32, 32)),
    Family("unet", images.SkewUNet, (2, 3, 24, 17)),
    Family("deeplab", images.deeplab_mini, (2, 3, 33, 25)),
    Family("resnet3d", residual.resnet3d_mini, (2, 3, 8, 16, 16)),
    Family("audio1d", signals.audio_mini, (2, 1, 400)),
    Family("transformer", partial(tokens.TransformerMini, tokens.SelfAttention), (2, 3, 16, 16)),
    Family("transformer_mha", partial(tokens.TransformerMini, tokens.FusedAttention), (2, 3, 16, 16)),
)


# --------------------------------------------------------------------------------------------------------------------
# Export


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters: their warnings, output and logs do not concern the model."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def exported(
    family: Family, *, dynamo: bool, training: bool, dynamic_batch: bool = False, fold: bool = True
) -> onnx.ModelProto:
    """Export the family's network, once for all processes of a test run."""
    folder = Path(os.environ[EXPORTS])
    options = {"dynamo": dynamo, "training": training, "dynamic_batch": dynamic_batch}

    def place(*, fold: bool) -> Path:
        words = [word for word, chosen in {**options, "fold": fold}.items() if chosen]
        return folder / "-".join([family.name, *words, "model.onnx"])

    if not place(fold=fold).exists():
        module, example = family.build().train(training), family.example()
        if dynamo:
            program = _dynamo(module, example, dynamic_batch=dynamic_batch)
            _store(program.model_proto, place(fold=False))
            with quiet():
                program.optimize()  # the exporter's own last step
            _store(program.model_proto, place(fold=True))
        else:
            _store(export(module, example, fold=fold, **options), place(fold=fold))
    return onnx.load(place(fold=fold))


def _store(proto: onnx.ModelProto, path: Path) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(proto.SerializeToString())
    draft.replace(path)


def _dynamo(
    module: nn.Module, example: Tensor, *, dynamic_batch: bool, dynamic_spatial: bool = False, opset: int = 18
) -> torch.onnx.ONNXProgram:
    axes = _axes(example, dynamic_batch=dynamic_batch, dynamic_spatial=dynamic_spatial)
    with quiet():
        program = torch.onnx.export(
            copy.deepcopy(module),
            (example,),
            input_names=["x"],
            output_names=["y"],
            opset_version=opset,
            dynamic_shapes=(axes,) if axes else None,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program


def _axes(example: Tensor, *, dynamic_batch: bool, dynamic_spatial: bool) -> dict[int, str]:
    axes: dict[int, str] = {0: "N"} if dynamic_batch else {}
    if dynamic_spatial:
        letters = {3: "L", 4: "HW", 5: "DHW"}[example.dim()]
        axes.update(zip(range(2, example.dim()), letters, strict=True))
    return axes


def export(
    module: nn.Module,
    example: Tensor,
    *,
    dynamo: bool,
    training: bool,
    dynamic_batch: bool = False,
    dynamic_spatial: bool = False,
    opset: int = 18,
    fold: bool = True,
) -> onnx.ModelProto:
    """Export a copy of the module in memory, with input `x` and output `y`.

    `fold=False` asks the exporter to keep evaluation-mode batch normalization and parameter names; training exports of
    the TorchScript exporter are never folded. See `keeps_mode` for training exports of the other one.
    """
    module = copy.deepcopy(module).train(training)
    axes = _axes(example, dynamic_batch=dynamic_batch, dynamic_spatial=dynamic_spatial)
    if dynamo:
        program = _dynamo(module, example, dynamic_batch=dynamic_batch, dynamic_spatial=dynamic_spatial, opset=opset)
        if fold:
            with quiet():
                program.optimize()  # the exporter's own last step
        return onnx.load_from_string(program.model_proto.SerializeToString())
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    if not training and not fold:
        mode = torch.onnx.TrainingMode.PRESERVE
    dynamic_axes: dict[str, dict[int, str]] = {}
    if axes:
        dynamic_axes["x"] = axes
        with torch.no_grad():
            rank = copy.deepcopy(module)(example).dim()
        dynamic_axes["y"] = {axis: name if axis == 0 else f"out_{name}" for axis, name in axes.items() if axis < rank}
    buffer = io.BytesIO()
    with quiet():
        torch.onnx.export(
            module,
            (example,),
            buffer,  # type: ignore[arg-type]
            input_names=["x"],
            output_names=["y"],
            opset_version=opset,
            dynamic_axes=dynamic_axes or None,
            dynamo=False,
            training=mode,
            do_constant_folding=fold and not training,
        )
    return onnx.load_from_string(buffer.getvalue())


def keeps_mode(module: nn.Module, *, dynamo: bool, training: bool) -> bool:
    """Whether the exported graph computes the same as the module in that mode.

    The dynamo exporter writes batch normalization in inference form even for a training module.
    """
    return not (dynamo and training and any(isinstance(m, _BATCH_NORMS) for m in module.modules()))


# --------------------------------------------------------------------------------------------------------------------
# References


def reference_gradients(
    module: nn.Module, x: Any, seed: Any, dtype: torch.dtype = torch.float64
) -> dict[str, np.ndarray]:
    """Gradients of `sum(seed * module(x))` in the module's current mode, by parameter name and `"x"`.

    Autograd runs on a copy, so that neither the running statistics nor the parameters of the module change.
    """
    module = copy.deepcopy(module).to(dtype)
    data = torch.as_tensor(x).detach().to(dtype).clone().requires_grad_(True)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(
        module(data), [data, *parameters.values()], torch.as_tensor(seed).to(dtype), allow_unused=True
    )
    return {
        name: (torch.zeros_like(value) if grad is None else grad).detach().numpy()
        for name, value, grad in zip(["x", *parameters], [data, *parameters.values()], grads, strict=True)
    }


float32_gradients = partial(reference_gradients, dtype=torch.float32)
"""PyTorch's gradients in float32; their distance to the reference is the precision that the problem allows."""


def match_parameters(proto: onnx.ModelProto, module: nn.Module) -> dict[str, tuple[str, str]]:
    """Map initializers to `(parameter name, transform)`, where transform is `"none"` or `"transpose"`.

    Values are compared even where the name was kept, because an exporter that folds batch normalization may reuse the
    name for changed weights. Without a matching name an initializer is mapped only if exactly one parameter fits.
    """
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    result: dict[str, tuple[str, str]] = {}
    for initializer in proto.graph.initializer:
        value = numpy_helper.to_array(initializer)
        same = [name for name, parameter in parameters.items() if np.array_equal(parameter, value)]
        turned = [name for name, parameter in parameters.items() if np.array_equal(parameter.T, value)]
        if initializer.name in same:
            result[initializer.name] = (initializer.name, "none")
        elif len(same) == 1:
            result[initializer.name] = (same[0], "none")
        elif not same and value.ndim == 2 and len(turned) == 1:
            result[initializer.name] = (turned[0], "transpose")
    return result
