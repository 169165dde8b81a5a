"""Kronecker-factored curvature of layers with weights: KFAC and EKFAC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.layers import WeightLayer, layer_of
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.warn import warn
from onnx_convgrad.curvature.loss_terms import LossTerm
from onnx_convgrad.curvature.products import sources_of
from onnx_convgrad.errors import ModelError, first_few
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import padded_data
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.lowering.conv.patches import patches_by_conv
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import compose, new_input
from onnx_convgrad.pipeline.options import Names, TargetLike
from onnx_convgrad.programs.terms import LossLike

APPROXIMATIONS = ("expand", "reduce")


@transformation
def kfac(
    model: AnyModel,
    *,
    loss: LossLike,
    wrt: Names = "parameters",
    approximation: str = "expand",
    target: TargetLike = "cpu",
) -> Built:
    """Return the Kronecker factors of the generalized Gauss-Newton matrix (Fisher matrix) of each layer's weight.

    For a layer with inputs a and gradients g of its results, the block of the weight, `[out, in]` by rows, is approximated
    by the Kronecker product of B (of the g, first) and A (of the a). The expectation over the outputs is exact: a loop goes
    over the columns of the root of the loss's Hessian. The block of a bias is B. The layers are Conv (without groups), Gemm
    and MatMul whose stored weight is in `wrt`.

    Other arguments and errors as for `ggn_product`.

    Args:
        loss: `"cross_entropy"`, `"mse"` or `"bce_with_logits"` of an output `[N, C]`, with the reduction mean or sum.
        approximation: How layers that apply a weight several times to a sample are treated: `"expand"` takes the places of a
            convolution, or the tokens of a sequence, for independent samples; `"reduce"` takes the mean of their inputs and
            the sum of their gradients.

    Returns:
        A model with the model's inputs and an input `target`; its outputs are `loss` and, for each weight w,
        `<w>_input_covariance` (A, `[in, in]`; of a Conv in the order channel, kernel) and `<w>_gradient_covariance` (B,
        `[out, out]`).

    Raises:
        ModelError: The model cannot be read, has no such layer, or the output is not `[N, C]`.

    Martens, Grosse (2015), arXiv:1503.05671; expand and reduce: Eschenhagen et al. (2023), arXiv:2311.00636. The factors are
    those of `KFACLinearOperator` in curvlinops with `fisher_type="type-2"`.
    """
    check_names([approximation], APPROXIMATIONS, "approximation")
    reduced = approximation == "reduce"

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        layers = _layers(e, sources_of(e, wrt))
        term = LossTerm.of(e, loss)

        def rows(places: ir.Value, reduction: str) -> ir.Value:
            """`[N, C]` or `[N * S, C]` from `[N, S, C]`."""
            if reduced:
                return e.reduce(reduction, places, [1], keepdims=False)
            batch, count, width = e.dims(places)
            return e.reshape(places, [e.size_mul(batch, count), width])

        def covariance(layer: _Layer, g: ir.Value) -> ir.Value:
            own = rows(layer.gradients(g), "ReduceSum")
            return e.matmul(e.swap_last(own), own)

        inputs = {}
        for layer in layers:
            own = rows(layer.inputs(), "ReduceMean")
            inputs[layer] = e.averaged(e.matmul(e.swap_last(own), own), e.dim(own, 0))
        gradients = _over_columns(e, term, {layer: layer.zeros(layer.rows) for layer in layers}, covariance)
        named = [(layer, kind, own) for layer in layers for kind, own in (("input", inputs), ("gradient", gradients))]
        return {"loss": term.value} | {
            f"{layer.weight.name}_{kind}_covariance": own[layer] for layer, kind, own in named
        }

    return compose(model, write, wrt=wrt, target=target)


@transformation
def ekfac(model: AnyModel, *, loss: LossLike, wrt: Names = "parameters", target: TargetLike = "cpu") -> Built:
    """Return the eigenvalues that fit best the eigenvectors of the Kronecker factors: the second moments in that basis.

    ONNX has no eigendecomposition: the caller computes the eigenvectors of the factors that `kfac` gives, as by
    `numpy.linalg.eigh`, and feeds them.

    Arguments and errors as for `kfac`.

    Returns:
        A model with the model's inputs, an input `target` and, for each weight w, inputs `<w>_input_basis` (`[in, in]`) and
        `<w>_gradient_basis` (`[out, out]`) with eigenvectors as columns; its outputs are `loss` and `<w>_eigenvalues`
        (`[out, in]`), the mean (for a loss with the reduction sum, the sum) over the samples of the squares of
        Q_B^T G Q_A, where G is the gradient of a sample.

    George et al. (2018), arXiv:1806.03884. The values are those of `EKFACLinearOperator` in curvlinops with
    `fisher_type="type-2"`.
    """

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        layers = _layers(e, sources_of(e, wrt))
        term = LossTerm.of(e, loss)
        rotated = {layer: e.matmul(layer.inputs(), layer.basis("input", layer.columns)) for layer in layers}
        bases = {layer: layer.basis("gradient", layer.rows) for layer in layers}
        zeros = {layer: layer.zeros(layer.columns) for layer in layers}

        def moments(layer: _Layer, g: ir.Value) -> ir.Value:
            own = e.matmul(layer.gradients(g), bases[layer])  # [N, S, out]
            gradients = e.matmul(e.swap_last(own), rotated[layer])  # [N, out, in]
            return e.reduce_sum(e.square(gradients), [0], keepdims=False)

        totals = _over_columns(e, term, zeros, moments)
        return {"loss": term.value} | {f"{layer.weight.name}_eigenvalues": totals[layer] for layer in layers}

    return compose(model, write, wrt=wrt, target=target)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A Conv, Gemm or MatMul with a stored weight.

    Attributes:
        e: The emitter.
        layer: The node, and which axes are which.
        weight: The weight.
        rows: Numbers of one result, `out`.
        columns: Numbers of one input, `in`.
    """

    e: Emitter
    layer: WeightLayer
    weight: ir.Value
    rows: int
    columns: int

    def zeros(self, columns: int) -> ir.Value:
        """Zeros `[out, columns]`."""
        sizes = [self.rows, columns]
        zeros = self.e.op("Expand", self.e.scalar(0, self.weight), self.e.ints(sizes))
        zeros.shape = ir.Shape(sizes)
        return zeros

    def basis(self, kind: str, size: int) -> ir.Value:
        """A new input with the eigenvectors of a factor."""
        dtype = self.weight.dtype or ir.DataType.FLOAT
        return new_input(self.e, f"{self.weight.name}_{kind}_basis", dtype, ir.Shape([size, size]))

    def _scales(self) -> tuple[float, float]:
        """Factors of inputs and gradients: alpha of a Gemm for its product, and beta for its bias, whose block is B."""
        node = self.layer.node
        if not is_op(node, "Gemm"):
            return 1.0, 1.0
        alpha, beta = (Call(node).float(name, 1.0) for name in ("alpha", "beta"))
        beta = beta if len(node.inputs) > 2 and beta else 1.0
        return alpha / beta, beta

    def inputs(self) -> ir.Value:
        """The inputs of each place of each sample: `[N, S, in]`."""
        e, x = self.e, self.layer.node.inputs[0]
        assert x is not None
        if not self.layer.convolves:
            return e.mul(self._places(e.swap_last(x) if self.layer.summed[0] == 0 else x), self._scales()[0])
        assert self.weight.shape is not None, "its sizes are known"
        _, channels, *kernel = self.weight.shape.numpy()
        x, win, _ = padded_data(e, Call(self.layer.node))
        patches = patches_by_conv(e, x, kernel, win, channels)  # [N, in, *y]
        return e.transpose(self._flat_places(patches), [0, 2, 1])

    def gradients(self, g: ir.Value) -> ir.Value:
        """The gradients of each place of each sample: `[N, S, out]`."""
        if self.layer.convolves:
            return self.e.transpose(self._flat_places(g), [0, 2, 1])
        return self.e.mul(self._places(g), self._scales()[1])

    def _flat_places(self, value: ir.Value) -> ir.Value:
        """`[N, C, S]` from `[N, C, ...]`."""
        e = self.e
        return e.reshape(value, [e.dim(value, 0), e.dim(value, 1), e.size_mul(1, *e.dims(value)[2:])])

    def _places(self, value: ir.Value) -> ir.Value:
        """`[N, S, C]` from `[N, ..., C]`."""
        e, last = self.e, self.e.rank(value) - 1
        return e.reshape(value, [e.dim(value, 0), e.size_mul(1, *e.dims(value)[1:last]), e.dim(value, last)])


def _layers(e: Emitter, weights: list[ir.Value]) -> list[_Layer]:
    """The layers whose weight is among some stored values; a warning names weights of other operators."""
    found: dict[ir.Value, _Layer] = {}
    for node in e.graph:
        layer = layer_of(node) if is_op(node, "Conv", "Gemm", "MatMul") else None
        if layer is None or layer.weight not in weights:
            continue
        weight = layer.weight
        if weight in found:
            raise ModelError(
                f"The weight {weight.name!r} is used by several nodes, and Kronecker factors belong to one.",
                hint="Leave it out of wrt.",
            )
        sizes, features = [known(d) for d in weight.shape or ()], layer.features
        if None in sizes or features is None or layer.group != 1 or (is_op(node, "MatMul") and len(sizes) != 2):
            continue
        inputs = math.prod(d for axis, d in enumerate(sizes) if d is not None and axis != features.of_weight)
        found[weight] = _Layer(e, layer, weight, layer.outputs or 0, inputs)
    left = [v.name or "" for v in weights if v not in found and len(v.shape or ()) > 1]
    if not found:
        raise ModelError("No Conv without groups, Gemm or MatMul has a stored weight in wrt.", hint="Name its weight.")
    if left:
        warn(f"These values have no Kronecker factors: {first_few(left)}.")
    return list(found.values())


def _over_columns(
    e: Emitter, term: LossTerm, zeros: Mapping[_Layer, ir.Value], summed: Callable[[_Layer, ir.Value], ir.Value]
) -> dict[_Layer, ir.Value]:
    """The sum over the columns of the root of the loss's Hessian of something of each layer's gradients."""

    def terms(column: ir.Value) -> dict[_Layer, ir.Value]:
        results = {layer: layer.layer.node.outputs[0] for layer in zeros}
        found = backward(e, {term.outputs: column}, dict.fromkeys(results.values()))
        return {layer: summed(layer, found[y]) for layer, y in results.items() if y in found}

    return term.over_columns(zeros, terms)
