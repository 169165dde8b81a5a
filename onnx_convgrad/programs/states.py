"""The values besides parameters that a step updates, with their initial numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.manifest import State
from onnx_convgrad.programs.masters import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.programs.plan import ProgramPlan
from onnx_convgrad.programs.privacy import EXPECTED, NOISE, first_noise


class States:
    """The initial numbers of the states of a plan, shared by all its graphs."""

    def __init__(self, plan: ProgramPlan) -> None:
        self.plan = plan
        self._tensors: dict[str, ir.TensorProtocol] = {}

    def input(self, draft: Draft, s: State) -> ir.Value:
        """The input of a state, with its initial value as the default."""
        if s.name not in self._tensors:
            start: Any = 0.0
            if s.slot == "loss_scale":
                start = self.plan.precision.init_scale
            elif s.slot in (NOISE, EXPECTED):
                start = first_noise(self.plan.seed) if s.slot == NOISE else 1
            elif s.slot in (AVERAGE, MASTER, AVERAGE_MASTER):
                tensor = self.plan.base.graph.initializers[s.of or ""].const_value
                start = tensor if tensor is None or s.slot == AVERAGE else tensor.numpy().astype(s.dtype)
            elif s.of is not None:
                start = self.plan.optimizer.of(s.of).optimizer.state()[s.slot or ""]
            self._tensors[s.name] = ir.Tensor(np.full(s.static_shape(), start, s.dtype), name=s.name)
        return draft.input(s, self._tensors[s.name])
