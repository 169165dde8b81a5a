"""Sparse weights are written out: onnx_ir has none, and ONNX Runtime too makes them dense when a session is made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_convgrad.errors import ModelError

__all__ = ["without_sparse"]


def without_sparse(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with dense initializers and Constants; itself where it has no sparse ones.

    Raises:
        ModelError: The indices of a sparse tensor do not fit its shape, or it is in an external file.
    """
    if not any(_holds_sparse(graph) for graph in _graphs(proto.graph)):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for graph in _graphs(result.graph):
        graph.initializer.extend(_dense(sparse, sparse.values.name) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                    tensor = _dense(attribute.sparse_tensor, node.output[0])
                    attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return result


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _holds_sparse(graph: onnx.GraphProto) -> bool:
    kinds = (a.type for node in graph.node for a in node.attribute)
    return bool(graph.sparse_initializer) or onnx.AttributeProto.SPARSE_TENSOR in kinds


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Values at linear indices `[n]`, or at one index per axis `[n, rank]`, zeros elsewhere."""
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
