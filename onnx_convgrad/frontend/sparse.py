"""Replace sparse weights by dense ones: onnx_ir has none, and ONNX Runtime makes them dense when it creates a session."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_convgrad.errors import ModelError


def without_sparse(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with dense initializers and Constants, or the model itself if it has no sparse ones.

    Raises:
        ModelError: The indices of a sparse tensor do not fit its shape, or it is in an external file.
    """
    if not any(graph.sparse_initializer or any(_sparse_attributes(graph)) for graph in _graphs(proto.graph)):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for graph in _graphs(result.graph):
        graph.initializer.extend(_dense(sparse, sparse.values.name) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for node, attribute in _sparse_attributes(graph):
            tensor = _dense(attribute.sparse_tensor, node.output[0])
            attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return result


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _sparse_attributes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, onnx.AttributeProto]]:
    pairs = ((node, attribute) for node in graph.node for attribute in node.attribute)
    return (pair for pair in pairs if pair[1].type == onnx.AttributeProto.SPARSE_TENSOR)


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Write values at linear indices `[n]`, or at one index per axis `[n, rank]`, and zeros elsewhere."""
    if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        raise ModelError(
            f"The sparse tensor {name!r} is in an external file.", hint="Store it densely, or in the model."
        )
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    result = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            result.reshape(-1)[indices] = values
        else:
            result[tuple(indices.T)] = values
    except (IndexError, ValueError) as problem:
        raise ModelError(
            f"The sparse tensor {name!r} of shape {list(sparse.dims)} is not valid: {problem}."
        ) from problem
    return numpy_helper.from_array(result, name)
