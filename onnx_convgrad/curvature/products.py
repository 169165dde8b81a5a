"""Products with the generalized Gauss-Newton matrix, and the diagonals of it and of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.per_sample.walk import backward_per_sample, data_inputs
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.curvature.loss_terms import LossTerm, summed
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.selection import resolve_wrt
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, placeholder
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.composed import compose, new_input
from onnx_convgrad.pipeline.options import Names, TargetLike
from onnx_convgrad.programs.terms import LossLike

METHODS = ("exact", "hutchinson")


@transformation
def ggn_product(model: AnyModel, *, loss: LossLike, wrt: Names = "parameters", target: TargetLike = "cpu") -> Built:
    """Return the generalized Gauss-Newton matrix of a loss times a vector.

    The matrix is J^T H J, where J is the Jacobian of the output by the parameters, and H the Hessian of the loss by the
    output. It is computed by one pass of forward and one of reverse mode.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        loss: One loss, as for `onnx_convgrad.build_training`, of a floating output.
        wrt: The values that the matrix belongs to, as for `onnx_convgrad.augment`.
        target: As for `onnx_convgrad.augment`.

    Returns:
        A model with the model's inputs, an input `target` (as in training) and an input `<p>_vector` for each member p of
        `wrt`; its outputs are `loss` and, for each p, `<p>_ggn_product` of its shape and dtype.

    Raises:
        ArgumentError: An unknown name or option, or a loss that does not fit the output.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.

    Schraudolph: Fast Curvature Matrix-Vector Products (2002).
    """

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        sources = sources_of(e, wrt)
        term = LossTerm.of(e, loss)
        y, value = term.outputs, term.value
        vectors = {p: new_input(e, f"{p.name}_vector", p.dtype or ir.DataType.FLOAT, p.shape) for p in sources}
        moved = forward(e, vectors, [y], directions=True)
        slopes = backward(e, {value: e.full_like(value, 1)}, [y])
        bent = forward(e, {y: moved[y]}, [slopes[y]]) if y in moved and y in slopes else {}
        found = backward(e, {y: bent[slopes[y]]}, dict.fromkeys(sources)) if bent else {}
        return {"loss": value} | {f"{p.name}_ggn_product": found.get(p) or e.zeros_like(p) for p in sources}

    return compose(model, write, wrt=wrt, target=target)


@transformation
def diagonal_ggn(model: AnyModel, *, loss: LossLike, wrt: Names = "parameters", target: TargetLike = "cpu") -> Built:
    """Return the diagonal of the generalized Gauss-Newton matrix of a loss, exactly.

    A loop over the C outputs of a sample squares the gradients of each sample for the columns of the root of H.
    Operators that mix samples are refused.

    Other arguments and errors as for `ggn_product`.

    Args:
        loss: `"cross_entropy"`, `"mse"` or `"bce_with_logits"` of an output `[N, C]`, with the reduction mean or sum.

    Returns:
        A model with the model's inputs and an input `target`; its outputs are `loss` and, for each member p of `wrt`,
        `<p>_diagonal_ggn` of its shape and dtype.

    The values are those of `DiagGGNExact` in BackPACK (Dangel, Kunstner, Hennig 2020, arXiv:1912.10985).
    """

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        sources = sources_of(e, wrt)
        data = data_inputs(e.graph, sources)
        term = LossTerm.of(e, loss)

        def squares(column: ir.Value) -> dict[ir.Value, ir.Value]:
            found = backward_per_sample(e, {term.outputs: column}, dict.fromkeys(sources), data).gradients
            return {p: e.reduce_sum(e.square(g), [0], keepdims=False) for p, g in found.items()}

        totals = term.over_columns({p: e.zeros_like(p) for p in sources}, squares)
        return {"loss": term.value} | {f"{p.name}_diagonal_ggn": e.typed(total, p) for p, total in totals.items()}

    return compose(model, write, wrt=wrt, target=target)


@transformation
def hessian_diagonal(
    model: AnyModel,
    *,
    loss: LossLike,
    wrt: Names = "parameters",
    method: str = "hutchinson",
    samples: int = 30,
    seed: int = 0,
    target: TargetLike = "cpu",
) -> Built:
    """Return the diagonal of the Hessian of a loss, estimated or exact.

    Other arguments and errors as for `ggn_product`.

    Args:
        loss: As for `ggn_product`, also the name of a scalar output.
        method: `"hutchinson"`: the mean of v * (H v) over random signs v, which is unbiased. `"exact"`: one product with H
            for each number of `wrt`, for small models.
        samples: The number of random v.
        seed: Of the random v. Runs after the first of a session draw others.

    Returns:
        A model with the model's inputs and an input `target` (if the loss takes one); its outputs are `loss` and, for each
        member p of `wrt`, `<p>_hessian_diagonal` of its shape and dtype.

    Bekas, Kokiopoulou, Saad: An Estimator for the Diagonal of a Matrix (2007).
    """
    check_names([method], METHODS, "method")
    samples, seed = whole(samples, "samples"), whole(seed, "seed", 0)

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        sources = sources_of(e, wrt)
        term = LossTerm.of(e, loss)
        slopes = backward(e, {term.value: e.full_like(term.value, 1)}, dict.fromkeys(sources))
        if method == "exact":
            found = {p: _exact(e, p, g) for p, g in slopes.items()}
        else:
            found = _estimated(e, slopes, samples, seed)
        return {"loss": term.value} | {
            f"{p.name}_hessian_diagonal": found[p] if p in found else e.zeros_like(p) for p in sources
        }

    return compose(model, write, wrt=wrt, target=target)


def _exact(e: Emitter, p: ir.Value, slope: ir.Value) -> ir.Value:
    """The diagonal of one parameter's block: the number of each product with a unit vector at its own place."""
    count = e.size_mul(1, *e.dims(p))
    numbers = e.arange(count)
    start, number = len(e.emitted), placeholder(e, numbers, ir.Shape([]))
    places = e.reshape(numbers, e.dims(p))
    unit = e.typed(e.mask(e.compare("Equal", places, number), p), p)
    bent = forward(e, {p: unit}, [slope])
    if slope not in bent:
        return e.zeros_like(p)
    entry = e.reduce_sum(e.reshape(e.mul(bent[slope], unit), [count]), [0], keepdims=False)
    _, (entries,) = emit_loop(e, start, [], {number: Slices(numbers)}, [(entry, Layout())])
    return e.reshape_like(entries, p)


def _estimated(e: Emitter, slopes: Mapping[ir.Value, ir.Value], samples: int, seed: int) -> dict[ir.Value, ir.Value]:
    """Hutchinson's estimate for all parameters at once."""

    def products(_: ir.Value) -> dict[ir.Value, ir.Value]:
        signs = {}
        for i, p in enumerate(slopes):
            drawn = e.op("RandomUniformLike", p, low=-1.0, high=1.0, seed=float(seed + i))
            signs[p] = e.typed(e.where(e.compare("Less", drawn, 0), e.scalar(-1, p), e.scalar(1, p)), p)
        bent = forward(e, signs, list(dict.fromkeys(slopes.values())), directions=True)
        return {p: e.mul(signs[p], bent[g]) for p, g in slopes.items() if g in bent}

    totals = summed(e, {p: e.zeros_like(p) for p in slopes}, e.arange(samples), products)
    return {p: e.div(total, samples) for p, total in totals.items()}


# -- shared with kronecker ---------------------------------------------------------------------------------------------


def sources_of(e: Emitter, wrt: Names) -> list[ir.Value]:
    """The values that a curvature belongs to; they are variables, also if they are stored."""
    sources = resolve_wrt(e.graph, wrt)
    mark_varying(e.graph, sources)
    return sources
