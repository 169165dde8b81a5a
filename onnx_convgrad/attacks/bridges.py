"""Bridges to other packages of attacks: an ONNX file as an estimator of ART or a model of foolbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.attacks.attack import Bounds
from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.optional import imported
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.pipeline.composed import one_floating_input
from onnx_convgrad.pipeline.layer import Layer, layer_of
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import scores_of
from onnx_convgrad.runtime import Providers


@typed_errors
def art_classifier(
    model: AnyModel,
    bounds: Bounds = (0.0, 1.0),
    *,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    providers: Providers | None = None,
    target: TargetLike = "cpu",
) -> Any:
    """Make a classifier an estimator of ART, for its white-box attacks and defenses of predictions. It is not trained.

    ONNX Runtime computes scores and gradients; neither needs PyTorch. Files of a fixed batch are run several times.

    Other arguments and errors as for `fgsm`.

    Args:
        bounds: The smallest and the largest number of the input, ART's `clip_values`.
        providers: Execution providers, as for `onnx_convgrad.session`.

    Returns:
        An `art.estimators.classification.classifier.ClassifierNeuralNetwork` whose predictions are the scores.

    Raises:
        ArgumentError: An unknown name or option, or the number of classes or the size of the input is unknown.
        ExecutionError: ART is not installed.
    """
    kind = _estimator()
    return kind(_Differentiated(model, of, input, providers, target), tuple(bounds))


@typed_errors
def foolbox_model(
    model: AnyModel,
    bounds: Bounds = (0.0, 1.0),
    *,
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    providers: Providers | None = None,
    target: TargetLike = "cpu",
) -> Any:
    """Make a classifier a `foolbox.PyTorchModel`: foolbox attacks tensors of PyTorch, ONNX Runtime computes the gradients.

    Other arguments and errors as for `art_classifier`.

    Args:
        bounds: The smallest and the largest number of the input.

    Raises:
        ExecutionError: foolbox or PyTorch is not installed.
    """
    foolbox = imported("foolbox", "foolbox_model needs foolbox")
    return foolbox.PyTorchModel(
        _torch_module(_Differentiated(model, of, input, providers, target)), bounds=tuple(bounds)
    )


def _torch_module(model: _Differentiated) -> Any:
    """The scores as a module of PyTorch whose gradients are those of the file."""
    import torch

    class Scores(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            context.save_for_backward(x)
            return torch.from_numpy(model.scores(x.numpy(force=True))).to(x.device)

        @staticmethod
        def backward(context: Any, slope: Any) -> Any:
            (x,) = context.saved_tensors
            return torch.from_numpy(model.slope(x.numpy(force=True), slope.numpy(force=True))).to(x.device)

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return Scores.apply(x)  # type: ignore[no-untyped-call]

    return Module().eval()


class _Differentiated:
    """The scores of a classifier and their gradients with respect to its input, by ONNX Runtime."""

    def __init__(
        self, model: AnyModel, of: str | None, name: str | None, providers: Providers | None, target: TargetLike
    ) -> None:
        self.layer, _ = layer_of(
            model, None, target, results=lambda e: {"scores": scores_of(e, of, None).values}, providers=providers
        )
        graph = self.layer.model.graph
        image = one_floating_input(graph, name)
        self.batch, *sizes = static_dims(image) or [None, None]
        classes = (static_dims(graph.outputs[0]) or [None])[-1]
        if classes is None or None in sizes:
            raise ArgumentError(
                "The number of classes and the size of the input are needed, and the file does not tell them.",
                hint="Give them to onnx_convgrad.load: load(path, input_shapes={...}).",
            )
        self.shape, self.classes = tuple(d for d in sizes if d is not None), classes
        self.dtype, self.wanted = (image.dtype or ir.DataType.FLOAT).numpy(), (graph.inputs.index(image),)

    def scores(self, x: np.ndarray) -> np.ndarray:
        """The scores `[N, C]` of inputs `[N, ...]`."""
        return self._run(self.layer, x)

    def slope(self, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        """The gradient of scores times `cotangent`, of the shape of the inputs."""
        return self._run(self.layer.vjp(self.wanted), x, cotangent)

    def _run(self, layer: Layer, *operands: np.ndarray) -> np.ndarray:
        """The only result of a layer; a fixed batch is filled up by repeating the last sample."""
        count = len(operands[0])
        size = self.batch or max(count, 1)
        rows = np.minimum(np.arange(-(-count // size) * size), count - 1)
        results = []
        for part in np.split(rows, len(rows) // size):
            feed = zip(layer.inputs, (x[part].astype(self.dtype) for x in operands), strict=True)
            results += layer.session.run(None, dict(feed))
        return np.concatenate(results)[:count]


@cache
def _estimator() -> Callable[..., Any]:
    """The class of estimators; its bases are ART's."""
    art = imported("art.estimators.classification.classifier", "art_classifier needs ART")
    base = art.ClassifierNeuralNetwork

    class Estimator(base):  # type: ignore[misc, valid-type] # ART is untyped
        """An ONNX file as an estimator of ART."""

        def __init__(self, model: _Differentiated, clip_values: Sequence[Any]) -> None:
            super().__init__(
                model=model,
                clip_values=clip_values,
                channels_first=len(model.shape) == 3 and model.shape[0] in (1, 3, 4),
                preprocessing=None,
            )
            self._file, self.nb_classes = model, model.classes

        @property
        def input_shape(self) -> tuple[int, ...]:
            """The shape of one sample."""
            return self._file.shape

        def predict(self, x: np.ndarray, batch_size: int = 128, **_: Any) -> np.ndarray:
            """The scores `[N, C]`."""
            return np.concatenate([self._file.scores(x[i : i + batch_size]) for i in range(0, len(x), batch_size)])

        def loss_gradient(self, x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
            """The gradient of the cross entropy of each sample; `y` holds one-hot rows or numbers of classes."""
            scores = self._file.scores(x).astype(np.float64)
            powers = np.exp(scores - scores.max(1, keepdims=True))
            wanted = np.asarray(y) if np.ndim(y) == 2 else np.eye(self.nb_classes)[np.asarray(y, np.int64)]
            share = wanted.sum(1, keepdims=True)
            return self._file.slope(x, powers / powers.sum(1, keepdims=True) * share - wanted)

        def class_gradient(self, x: np.ndarray, label: Any = None, **_: Any) -> np.ndarray:
            """The gradients of scores, `[N, C, ...]`, or `[N, 1, ...]` of one class for each sample."""
            rows = np.eye(self.nb_classes)
            if label is not None:
                labels = np.broadcast_to(np.asarray(label, np.int64).reshape(-1), (len(x),))
                return self._file.slope(x, rows[labels])[:, None]
            return np.stack([self._file.slope(x, np.tile(row, (len(x), 1))) for row in rows], 1)

        def fit(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError("An ONNX file is trained with onnx_convgrad.build_training.")

        def get_activations(self, *_: Any, **__: Any) -> np.ndarray:
            raise NotImplementedError("An ONNX file gives its outputs alone.")

        def save(self, filename: str, path: str | None = None) -> None:
            raise NotImplementedError(
                f"The file exists already; {os.fspath(Path(path or '.') / filename)} is not written."
            )

    return Estimator
