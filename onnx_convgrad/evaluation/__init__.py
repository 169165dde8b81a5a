"""Run finished models over data: predictions, scores, and gradients of many inputs."""

from onnx_convgrad.evaluation.mapper import Mapper

__all__ = ["Mapper"]
