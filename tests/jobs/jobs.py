"""Jobs that people train, each as a PyTorch module with its loss, and the loss as an argument of `build_training`."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import onnx_convgrad as og
from tests.support.families import quiet

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        module: Makes the network; the arrays of a batch named in `inputs` are its arguments.
        inputs: Names of the inputs of the exported file.
        outputs: Names of its outputs.
        batch: The arrays of step i: inputs, and labels by the names of the program.
        loss: The argument `loss` of `build_training`.
        torch_loss: PyTorch's loss of the outputs and the batch.
        options: Further arguments of `build_training`.
    """

    module: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: Callable[[int], Batch]
    loss: Any
    torch_loss: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def exported(job: Job, module: nn.Module) -> onnx.ModelProto:
    """The network as a file in training mode, without folding."""
    arguments = tuple(torch.from_numpy(job.batch(0)[name]) for name in job.inputs)
    file = io.BytesIO()
    with quiet():
        torch.onnx.export(
            module,
            arguments,
            file,  # type: ignore[arg-type]
            input_names=list(job.inputs),
            output_names=list(job.outputs),
            opset_version=18,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    return onnx.load_from_string(file.getvalue())


def losses(job: Job, steps: int = 20) -> tuple[list[float], list[float]]:
    """Losses of the steps of AdamW, in PyTorch with float64 and by a trainer of the exported file."""
    torch.manual_seed(0)
    module = job.module().train()
    program = og.build_training(exported(job, module), loss=job.loss, optimizer=og.optim.AdamW(1e-3), **job.options)
    trainer = og.Trainer(program)
    ours = [float(trainer.step(job.batch(step))["loss"]) for step in range(steps)]
    module = module.double()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    theirs = []
    for step in range(steps):
        batch = {name: torch.from_numpy(array) for name, array in job.batch(step).items()}
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        optimizer.zero_grad()
        results = module(*(batch[name] for name in job.inputs))
        loss = job.torch_loss(*(results if isinstance(results, tuple) else (results,)), **batch)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    return ours, theirs
