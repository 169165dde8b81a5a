"""Measure a model on data, and change it by what was measured: BatchNormalization put back behind convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.data.batches import Batches, DataLike, as_batches, as_dataset, data_only
from onnx_convgrad.data.inputs import Batch, BatchLike
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import AnyModel, cloned, copied
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.metadata import preprocessing_of, states_of
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.pipeline.modes import set_inference
from onnx_convgrad.programs.batch_axes import batch_axes
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.runtime import session
from onnx_convgrad.surgery.adapters.layers import adapters_of
from onnx_convgrad.surgery.batchnorm import convolutions, insert
from onnx_convgrad.training.stream_states import StreamStates

_OLDEST = 7
"""The first opset in which the number of results does not decide the mode of BatchNormalization."""


@transformation
def unfold_batchnorm(
    model: AnyModel,
    data: DataLike,
    *,
    layers: str | Iterable[str] = "*",
    samples: int = 1024,
    batch_size: int | None = None,
    names: Mapping[str, str] | None = None,
) -> ir.Model:
    """Put BatchNormalization back behind the convolutions (Conv, ConvTranspose) that it was folded into.

    The model computes the same as before, up to rounding: running mean and variance are those that each channel has on the
    data, the scale is the root of variance + 1e-5, and the bias is the mean. In a training program it normalizes by the
    batch, as the network did before its BatchNormalization was folded (Ioffe and Szegedy 2015, Jacob et al. 2018).
    Shapes and values that `onnx_convgrad.load` was given hold while the model is run; the result has all its inputs.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        data: Samples as the model meets them: what `Trainer.fit` takes. Labels are not needed, and are left out.
        layers: Names and globs of convolutions, of their weights or their results. Globs leave out those that a
            BatchNormalization follows already, whose result is an output of the model, or that are in the body of an If,
            Loop or Scan; such a name in full is an error.
        samples: Most samples to measure. They are taken in random order, always the same.
        batch_size: Samples that are run at a time.
        names: Input -> name of its array, for inputs that cannot be matched automatically.

    Returns:
        The model with the same opset, inputs and outputs. Behind a convolution with the weight `conv1.weight` there are
        `conv1.bn.weight`, `.bias`, `.running_mean` and `.running_var`; a bias of the convolution becomes part of them.

    Raises:
        ArgumentError: Nothing matches `layers`, the data do not fit the inputs, or the model has adapters.
        ModelError: The model cannot be read or run, or results on the data are not finite.
    """
    loaded = load(model)
    changed = copied(loaded.source)
    if adapters_of(changed):
        raise ArgumentError(
            "The model has adapters, which are trained alone, with stored statistics.",
            hint="Merge them first, with og.transforms.merge_adapters, or add them to the result.",
        )
    version = changed.opset_imports.get("", _OLDEST)
    if version < _OLDEST:
        raise ModelError(
            f"The model has opset {version}; BatchNormalization is put back from opset {_OLDEST} on.",
            hint="Convert it with onnx.version_converter.",
        )
    nodes = convolutions(changed.graph, layers)
    values = [node.outputs[0].name or "" for node in nodes]
    measured = channel_moments(loaded, values, data, whole(samples, "samples"), batch_size, names)
    for node in nodes:
        moments = measured[node.outputs[0].name or ""]
        insert(changed, node, moments.mean, moments.variance)
    return changed


# -- moments of channels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance (with the denominator n) of each channel, float64, over `count` entries per channel."""

    count: int
    mean: np.ndarray
    variance: np.ndarray

    def union(self, other: Moments) -> Moments:
        """The moments of both sets of entries together (Chan, Golub and LeVeque 1983)."""
        count = self.count + other.count
        share, gap = other.count / count, other.mean - self.mean
        variance = (1 - share) * self.variance + share * other.variance + share * (1 - share) * gap**2
        return Moments(count, self.mean + share * gap, variance)


def channel_moments(
    model: Model,
    values: Sequence[str],
    data: DataLike,
    samples: int,
    batch_size: int | None = None,
    names: Mapping[str, str] | None = None,
) -> dict[str, Moments]:
    """Measure values of a model in inference mode on data; the channels are along axis 1.

    ONNX Runtime computes the moments of each batch in float32, centered, so that whole activations never leave it.
    """
    m = cloned(model.canonical)
    set_inference(m.graph)
    batches = inputs_of(cloned(m), data, batch_size, names)
    _let_return_moments(m.graph, values)
    live = session(m)
    total: dict[str, Moments] = {}
    done = 0
    for batch in batches:
        done += max((len(array) for array in batch.values() if array.ndim), default=1)
        measured = iter(live.run(None, batch))
        for name, count, mean, variance in zip(values, measured, measured, measured, strict=True):
            got = Moments(int(count), mean.astype(np.float64), variance.astype(np.float64))
            if not (np.isfinite(got.mean).all() and np.isfinite(got.variance).all()):
                raise ModelError(
                    f"{name!r} is not finite on the data.", hint="Look for NaN and huge numbers in the data."
                )
            total[name] = total[name].union(got) if name in total else got
        if done >= samples:
            break
    if not total:
        raise ArgumentError("The data hold no batch to measure.", hint="Give at least one sample.")
    return total


def _let_return_moments(graph: ir.Graph, names: Sequence[str]) -> None:
    """Let the outputs of a graph be count, mean and variance of the channels of some values."""
    values, e, results = named_values(graph), Emitter(graph), []
    for name in names:
        y = values.get(name)
        dims = None if y is None else static_dims(y)
        if y is None or dims is None:
            raise ModelError(f"The rank of {name!r} is not known.", hint="Declare the shapes of the model's inputs.")
        wide, axes = e.cast(y, ir.DataType.FLOAT), [axis for axis in range(len(dims)) if axis != 1]
        mean = e.reduce("ReduceMean", wide, axes)
        variance = e.reduce("ReduceMean", e.square(e.sub(wide, mean)), axes, keepdims=False)
        flat = e.squeeze(mean, axes)
        count = e.op("Div", e.op("Size", y), e.op("Size", flat))
        results += [count, flat, variance]
    graph.outputs.clear()
    for i, value in enumerate(results):
        value.name = e.names.claim(f"moment_{i}")
        graph.outputs.append(value)


def inputs_of(
    model: ir.Model, data: DataLike, batch_size: int | None, names: Mapping[str, str] | None
) -> Iterator[Batch]:
    """The batches of data for the inputs of a model, in a random order that is always the same; labels are dropped.

    States that the data have no array for begin with zeros, and are then what the model computes.
    """
    manifest = inputs_manifest(model)
    own, states, live = {port.name for port in manifest.data}, StreamStates(manifest), None

    def only(epoch: int) -> Iterator[BatchLike]:
        return data_only(data, epoch, len(own))

    iterated = as_dataset(data) is None and not isinstance(data, Batches)
    source = only if iterated and (isinstance(data, Iterable) or callable(data)) else data
    for batch in as_batches(source, manifest, batch_size=batch_size, names=names).epoch_iterator(0):
        fed = {name: array for name, array in states.fed(batch).items() if name in own}
        yield fed
        if not manifest.states.keys() <= batch.keys():
            live = live or session(model)
            outputs = list(manifest.states.values())
            states.taken(dict(zip(outputs, live.run(outputs, fed), strict=True)), ())


def inputs_manifest(model: ir.Model) -> Manifest:
    """The inputs of a model as those of a program, with its preprocessing."""
    ports = tuple(Port.from_value(v) for v in model.graph.inputs if not v.is_initializer())
    names = {port.name for port in ports}
    options = {
        "states": {name: output for name, output in states_of(model).items() if name in names},
        "batch_axes": batch_axes(model, names),
    }
    plain = Manifest(ports, (), Port("learning_rate", "float32", ()), "", (), (), (), (), options=options)
    return plain.described(None, preprocessing_of(model))
