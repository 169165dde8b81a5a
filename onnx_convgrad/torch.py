"""An ONNX file as a PyTorch layer (tool: may change in a minor version).

For example `onnx_convgrad.torch.Module("model.onnx")`. ONNX Runtime computes the layer and its gradients,
of any order, by graphs that this package builds on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.optional import install
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.pipeline.layer import Layer, layer_of
from onnx_convgrad.pipeline.options import Names, TargetLike
from onnx_convgrad.runtime import Providers, SessionOptionsLike, import_runtime
from onnx_convgrad.runtime.binding import Binding

try:
    import torch
except ImportError:
    raise ExecutionError("PyTorch is not installed.", hint=f"Install it with {install('torch')}.") from None

__all__ = ["Module"]


class Module(torch.nn.Module):
    """An ONNX model whose parameters are those of a PyTorch module, and which autograd differentiates.

    The stored values `wrt` become parameters under their own names, as `weight` of a module `conv1` for `conv1.weight`; the
    other stored values stay in the graph. Gradients flow to parameters and floating inputs, and can be differentiated
    again. Tensors are passed to ONNX Runtime and back without copies (DLPack).

    BatchNormalization and Dropout do what their nodes say: `train()` and `eval()` change nothing.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        wrt: The parameters, as for `onnx_convgrad.augment`; `None` for none.
        providers: Execution providers, as for `onnx_convgrad.session`; the CPU by default.
        options: Session options, as there.
        target: As for `onnx_convgrad.augment`.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or brought to opset 21.
        ExecutionError: ONNX Runtime or a provider is missing.
    """

    @typed_errors
    def __init__(
        self,
        model: AnyModel,
        *,
        wrt: Names | None = "parameters",
        providers: Providers | None = None,
        options: SessionOptionsLike | None = None,
        target: TargetLike = "cpu",
    ) -> None:
        super().__init__()
        self._layer, stored = layer_of(model, wrt, target, providers=providers, options=options)
        count = len(self._layer.inputs) - len(stored)
        self.input_names, self.output_names = tuple(self._layer.inputs[:count]), tuple(self._layer.outputs)
        self._paths = [_path(name, stored) for name in stored]
        for path, array in zip(self._paths, stored.values(), strict=True):
            owner: torch.nn.Module = self
            for part in path[:-1]:
                if part not in owner._modules:  # noqa: SLF001 - `hasattr` would find methods of a module
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(path[-1], torch.nn.Parameter(torch.from_numpy(array.copy())))

    def extra_repr(self) -> str:
        return f"{', '.join(self.input_names)} -> {', '.join(self.output_names)}"

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Compute the outputs.

        Args:
            inputs: The inputs in the order of the file.
            named: Further inputs by name.

        Returns:
            A tensor, or a tuple of several in the order of the file.

        Raises:
            ArgumentError: An input is missing, unknown or no tensor.
            ExecutionError: ONNX Runtime cannot run the model on these tensors.
            DifferentiationError: Some nodes cannot be differentiated; all are listed.
        """
        given = {**dict(zip(self.input_names, inputs, strict=False)), **named}
        if len(inputs) > len(self.input_names) or set(given) != set(self.input_names):
            raise ArgumentError(
                f"The layer takes {', '.join(self.input_names)}, not {len(inputs)} inputs"
                + (f" and {', '.join(named)}." if named else ".")
            )
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(f"The input {name!r} is {type(tensor).__name__}, not a tensor.")
        operands = [given[name] for name in self.input_names]
        results = _Call.apply(self._layer, *operands, *self._values())  # type: ignore[no-untyped-call]
        return results[0] if len(results) == 1 else results

    def to_model(self) -> ir.Model:
        """The ONNX model with the present values of the parameters, which `onnx_convgrad.save` writes."""
        model = cloned(self._layer.model)
        graph, values = model.graph, named_values(model.graph)
        for name, parameter in zip(self._layer.inputs[len(self.input_names) :], self._values(), strict=True):
            value = values[name]
            graph.inputs.remove(value)
            value.const_value = ir.Tensor(parameter.detach().cpu().numpy().copy(), name=name)
            graph.register_initializer(value)
        return model

    def _values(self) -> list[torch.Tensor]:
        """The values of the parameters, or the tensors that PyTorch has put in their place (parametrizations, pruning)."""
        return [functools.reduce(getattr, path, self) for path in self._paths]  # type: ignore[misc]


def _path(name: str, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """The path of modules to register a parameter in: the parts of its name, as in PyTorch, unless they are ambiguous."""
    ambiguous = any(other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in names)
    parts = name.split(".")
    reserved = any(not part or hasattr(torch.nn.Module, part) for part in parts)
    return [name.replace(".", "_")] if ambiguous or reserved else parts


class _Call(torch.autograd.Function):
    """One call of a layer. Its backward pass is a call of another layer, if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wanted = tuple(i for i, d in enumerate(layer.differentiable) if d and ctx.needs_input_grad[i + 1])
        ctx.layer, ctx.wanted = layer, wanted
        if not wanted:
            return tuple(_run(layer, operands))
        halves = layer.halves(wanted)
        results = _run(halves.forward, operands)
        named = dict(zip(halves.forward.outputs, results, strict=True))
        ctx.save_for_backward(*operands, *(named[name] for name in halves.kept))
        own = results[: len(layer.outputs)]
        ctx.mark_non_differentiable(*(y for y, f in zip(own, layer.floating, strict=True) if not f))
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, wanted = ctx.layer, ctx.wanted
        floating = [g for g, f in zip(grads, layer.floating, strict=True) if f]
        count = len(layer.inputs)
        saved = ctx.saved_tensors  # read once: `torch.utils.checkpoint` refuses a second time
        operands, kept = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # the gradient is differentiated again
            found: Sequence[torch.Tensor] = _Call.apply(layer.vjp(wanted), *operands, *floating)  # type: ignore[no-untyped-call]
        else:
            halves = layer.halves(wanted)
            found = _run(halves.backward, [*(operands[i] for i in halves.operands), *kept, *floating])
        result: list[torch.Tensor | None] = [None] * (1 + count)
        for i, gradient in zip(wanted, found, strict=True):
            result[i + 1] = gradient
        return tuple(result)


def _run(layer: Layer, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a layer on tensors; on the CPU and on CUDA they share their memory with ONNX Runtime."""
    bound = Binding(layer.session)
    kind, number = bound.device
    device = torch.device(kind, number) if kind == "cuda" else torch.device("cpu")
    held = [
        tensor.detach().to(device).contiguous() for tensor in operands
    ]  # the binding does not keep their memory alive
    bound.bind({name: _shared(tensor, bound) for name, tensor in zip(layer.inputs, held, strict=True)})
    bound.bind_results()
    if kind == "cuda":
        torch.cuda.current_stream(device).synchronize()
    try:
        bound.run()
    except Exception as problem:
        raise ExecutionError(f"ONNX Runtime could not run the layer: {problem}") from problem
    results = bound.results().values()
    return [torch.utils.dlpack.from_dlpack(v if hasattr(v, "__dlpack__") else v.numpy()) for v in results]


def _shared(tensor: torch.Tensor, bound: Binding) -> Any:
    """An `OrtValue` of a tensor; runtimes without DLPack copy what is on a GPU."""
    values = import_runtime().OrtValue
    return values.from_dlpack(tensor) if hasattr(values, "from_dlpack") else bound.put(tensor.cpu().numpy())
