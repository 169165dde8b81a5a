"""What is asked of a node: which operator it is, who reads its result, and for which other node it was added."""

from __future__ import annotations

from typing import TypeGuard

import onnx_ir as ir

__all__ = ["ORIGIN", "is_op", "origin_of", "sole_producer"]

ORIGIN = "onnx_convgrad.origin"
"""`metadata_props` key of a node that was added to a model: the name of the forward node that it was added for."""


def origin_of(node: ir.Node) -> str:
    """The name of the forward node that a node was added for; empty for nodes of the model's own."""
    return node.metadata_props.get(ORIGIN, "")


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether there is a node, and it is one of these operators of ai.onnx, a domain that onnx_ir writes as empty."""
    return node is not None and not node.domain and node.op_type in op_types


def sole_producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value for one reader alone: it is read once, and is no output of the graph."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return value.producer()
