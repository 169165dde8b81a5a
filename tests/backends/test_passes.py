"""Every pass can be run alone by `onnx_ir`, keeps the outputs, and reports whether it changed the model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnx_convgrad import backends, memory
from onnx_convgrad.backends.compared_clamps import CompareInsteadOfClamping
from onnx_convgrad.backends.covariance import NormalizeByCovariance
from onnx_convgrad.backends.cpu.batch_statistics import ShareBatchStatistics
from onnx_convgrad.backends.cpu.fast_forms import UseFastForms
from onnx_convgrad.backends.cpu.gelu import FuseGelu
from onnx_convgrad.backends.cpu.group_statistics import ShareGroupStatistics
from onnx_convgrad.backends.cpu.pad_in_conv import PadInConv
from onnx_convgrad.backends.cpu.parts import ConvolveParts
from onnx_convgrad.backends.cpu.pooled_slopes import MoveSlopesBehindPools
from onnx_convgrad.backends.cpu.recurrent import WriteOutRecurrent
from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.backends.cuda.batched_updates import BatchUpdates
from onnx_convgrad.backends.cuda.channel_factors import MoveChannelFactors
from onnx_convgrad.backends.cuda.staged_sums import StageSums
from onnx_convgrad.backends.missing_operators import ReplaceMissingOperators
from onnx_convgrad.backends.narrow_gradients import NarrowWeightGradients
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes, WriteFloat64
from onnx_convgrad.backends.unsupported_forms import ReplaceUnsupportedForms
from onnx_convgrad.backends.weight_copies import CopyPackedWeights
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.notes import ORIGIN
from onnx_convgrad.ir.passes import GraphPass, NodePass, run_passes
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.memory.activation_precision import NarrowActivations
from onnx_convgrad.memory.in_place import WriteInPlace
from onnx_convgrad.memory.recompute import RecomputeValues, mark_boundary
from onnx_convgrad.memory.timeline import SortByDepth
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

CPU, CUDA = TARGETS["cpu"], TARGETS["cuda"]
NEGATED = graph_of("(float[3] x) => (float[3] y) { y = Neg (x) }", opset=21)


@dataclass(frozen=True)
class Example:
    """A model that a pass changes, in ONNX's text form, and an operator that is no longer used afterwards."""

    text: str
    gone: str = ""
    make: Callable[[ir.Model], GraphPass] | None = None
    """The pass for the model; by default it is made for the CPU."""

    def model(self) -> onnx.ModelProto:
        model = graph_of(self.text, opset=21, domains=f', "{DOMAIN}" : 1')
        for index, node in enumerate(model.graph.node):
            node.name = f"node_{index}"
        return onnx.shape_inference.infer_shapes(model)


def _recompute(model: ir.Model) -> GraphPass:
    forward = [node for node in model.graph if node.op_type in ("Relu", "Tanh", "Sigmoid")]
    return RecomputeValues(CPU, mark_boundary(model.graph, forward), ["a"])


EXAMPLES: dict[type[GraphPass], Example] = {
    ConvolveParts: Example(
        "(float[1, 16, 8, 8] a, float[1, 32, 8, 8] b, float[2, 48, 1, 1] w) => (float[1, 2, 8, 8] y)"
        " { c = Concat <axis = 1> (a, b) y = Conv (c, w) }",
        "Concat",
        lambda _: ConvolveParts(CPU),
    ),
    AvoidRuntimeFaults: Example(
        "(float[1, 3] x) => (float[0, 3] y) <int64[2] s = {0, 3}> { n = Neg (x) e = Expand (n, s) y = Neg (e) }",
        "Expand",
    ),
    BatchUpdates: Example(
        "(float[3] a, float[3] b, float[3] c) => (float[3] x, float[3] y, float[3] z) <float[3] k = {1, 2, 3}>"
        " { p = Mul (a, a) x = Sub (k, p) q = Mul (b, b) y = Sub (k, q) r = Mul (c, c) z = Sub (k, r) }",
        make=lambda _: BatchUpdates(CUDA),
    ),
    FuseGelu: Example(
        "(float[4, 5] x) => (float[4, 5] y) <float r = {1.4142135}, float one = {1}, float half = {0.5}>"
        " { u = Div (x, r) e = Erf (u) s = Add (e, one) p = Mul (x, s) y = Mul (p, half) }",
        "Erf",
        lambda _: FuseGelu(),
    ),
    NormalizeByCovariance: Example(
        "(float[16, 24, 56, 56] x, float[144, 24, 1, 1] w, float[144] s, float[144] p, float[144] q)"
        " => (float[16, 144, 56, 56] y)"
        " { u = Conv (x, w) y, m, v = BatchNormalization <training_mode = 1> (u, s, s, p, q) }",
        "BatchNormalization",
    ),
    PadInConv: Example(
        "(float[2, 3, 6, 6] x, float[4, 3, 3, 3] w) => (float[2, 4, 6, 6] y) <int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}>"
        " { a = Pad (x, p) y = Conv (a, w) }",
        "Pad",
    ),
    NarrowActivations: Example(  # of integers, which float16 holds
        "(float[64, 64] x) => (float[64, 64] y) { a = Round (x) b = Neg (a) y = Mul (b, a) }",
        make=lambda model: NarrowActivations(CPU, mark_boundary(model.graph, list(model.graph)[:2]), "float16"),
    ),
    RecomputeValues: Example(
        "(float[64, 64] x) => (float[64, 64] y)"
        " { a = Relu (x) b = Tanh (a) c = Sigmoid (b) d = Mul (c, c) y = Mul (d, a) }",
        make=_recompute,
    ),
    CompareInsteadOfClamping: Example(
        "(float[2, 3] x) => (float[2, 3] y) { y = Relu (x) }", "Relu", lambda _: CompareInsteadOfClamping()
    ),
    CopyPackedWeights: Example(
        "(float[3, 2] x) => (float[3, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { a = Gemm <transB = 1> (x, w) y = Gemm (a, w) }",
        make=lambda _: CopyPackedWeights(),
    ),
    ReplaceMissingOperators: Example(
        "(float[2, 3] x) => (float[2, 3] y) { y = Softsign (x) }",
        "Softsign",
        lambda _: ReplaceMissingOperators(TARGETS["webgpu"]),
    ),
    SortByDepth: Example(
        "(float[1, 64] x, float[64, 64] v, float[64, 64] w) => (float[1, 64] y)"
        " { a = Exp (x) s = Transpose (v) b = MatMul (a, s) c = Exp (b) t = Transpose (w) y = MatMul (c, t) }",
        make=lambda _: SortByDepth(),
    ),
    WriteInPlace: Example(
        "(float[4, 64] x, float[64, 64] w) => (float[64, 64] y, float[4, 64] b)"
        " { s = Transpose <perm = [1, 0]> (x) d = MatMul (s, x) y = Sub (w, d) b = MatMul (x, w) }",
        make=lambda _: WriteInPlace({"y": "w"}),
    ),
    ReplaceUnsupportedForms: Example(
        "(float[2, 3, 6, 6] x, float[4, 3, 3, 3] w) => (float[2, 4, 5, 5] y) { y = Conv <pads = [0, 0, 1, 1]> (x, w) }",
        make=lambda _: ReplaceUnsupportedForms(CUDA),
    ),
    SeparateTransposes: Example(
        "(double[3, 4] x, double[3, 5] w) => (double[4, 5] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, w) }",
    ),
    ShareBatchStatistics: Example(
        "(float[4, 3, 5] x, float[3] s) => (float[4, 3, 5] y, float[3] m, float[3] v)"
        " { y, m, v = BatchNormalization <training_mode = 1, momentum = 0.7> (x, s, s, s, s) }",
        make=lambda _: ShareBatchStatistics(),
    ),
    ShareGroupStatistics: Example(
        "(float[4, 3, 5] x, float[3] s) => (float[4, 3, 5] y) { y = InstanceNormalization (x, s, s) }",
        "InstanceNormalization",
    ),
    NarrowWeightGradients: Example(
        "(float[2, 3, 6, 6] x, float[2, 8, 6, 6] g, float[2, 3, 1, 1] a, float[6, 3, 1, 1] b) => (float[2, 3, 1, 1] y)"
        " <int64[1] s = {0}, int64[1] t = {2}>"
        " { w = Concat <axis = 0> (a, b) d = convgrad.ConvWeightGrad <strides = [1, 1], dilations = [1, 1],"
        " pads = [0, 0, 0, 0], group = 1> (x, g, w) y = Slice (d, s, t, s) }",
    ),
    MoveChannelFactors: Example(
        "(float[2, 3, 6, 6] x, float[2, 4, 6, 6] g, float[4, 3, 1, 1] w, float[4, 1, 1] f)"
        " => (float[2, 3, 6, 6] y, float[4, 3, 1, 1] z)"
        " { u = Mul (g, f) y = convgrad.ConvInputGrad <strides = [1, 1], dilations = [1, 1], pads = [0, 0, 0, 0], group = 1>"
        " (u, w, x) z = convgrad.ConvWeightGrad <strides = [1, 1], dilations = [1, 1], pads = [0, 0, 0, 0], group = 1>"
        " (x, u, w) }",
        make=lambda _: MoveChannelFactors(CUDA),
    ),
    MoveSlopesBehindPools: Example(
        "(float[2, 3, 6, 6] x, float[2, 3, 3, 3] g) => (float[2, 3, 6, 6] y, float[2, 3, 3, 3] p)"
        " { a = Relu (x) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)"
        " d = convgrad.MaxPoolGrad <kernel_shape = [2, 2], strides = [2, 2]> (g, a) s = HardSigmoid (a) y = Mul (d, s) }",
    ),
    StageSums: Example(
        "(float[4, 3, 5] x) => (float[3] y) <int64[2] a = {0, 2}> { y = ReduceMean <keepdims = 0> (x, a) }",
        make=lambda _: StageSums(CUDA),
    ),
    UseFastForms: Example(
        "(float[64, 512] x) => (float[64, 512] y) { y = Softplus (x) }",
        "Softplus",
        lambda _: UseFastForms(CPU, training=True),
    ),
    WidenBfloat16: Example(
        "(float[3] x) => (float[3] y) { a = Cast <to = 16> (x) b = Neg (a) y = Cast <to = 1> (b) }",
    ),
    WriteFloat64: Example("(double[3] x) => (double[3] y) { y = Mish (x) }", "Mish"),
    WriteOutRecurrent: Example(
        "(float[3, 2, 4] x, float[1, 5, 4] w, float[1, 5, 5] r) => (float[3, 1, 2, 5] y)"
        " { y = RNN <hidden_size = 5> (x, w, r) }",
        "RNN",
    ),
}


def _made(kind: type[GraphPass], model: ir.Model) -> GraphPass:
    make = EXAMPLES[kind].make
    return make(model) if make else kind(CPU)  # type: ignore[call-arg]


def _subclasses(kind: type[GraphPass]) -> set[type[GraphPass]]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _passes() -> set[type[GraphPass]]:
    """Every concrete pass of the rooms that rewrite finished graphs."""
    for room in (backends, memory):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    return {kind for kind in _subclasses(GraphPass) if kind.__module__.startswith((backends.__name__, memory.__name__))}


def test_every_pass_has_an_example_and_says_what_it_does() -> None:
    assert _passes() == set(EXAMPLES)
    for kind in EXAMPLES:
        assert kind.__doc__
        assert kind.__doc__ != GraphPass.__doc__


def _lowered(proto: onnx.ModelProto) -> ir.Model:
    """The model without abstract operators, which no runtime has."""
    model = ir.from_proto(proto)
    lower(model.graph, CPU)
    return model


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_a_pass_reports_whether_it_changed_the_model(kind: type[GraphPass]) -> None:
    example = EXAMPLES[kind]
    before = example.model()
    model = ir.from_proto(before)
    if kind in (MoveSlopesBehindPools, MoveChannelFactors):  # which rewrite what differentiation added
        for node in [n for n in model.graph if n.op_type in ("MaxPoolGrad", "HardSigmoid", "Mul")]:
            node.metadata_props[ORIGIN] = "pool"
    rewrite = _made(kind, model)
    assert ir.passes.Sequential(rewrite)(model).modified
    RemoveUnusedNodesPass()(model)
    after = ir.to_proto(model)
    assert example.gone not in {node.op_type for node in after.graph.node}
    names = [node.name for node in after.graph.node if node.name]
    assert len(set(names)) == len(names)
    assert [output.name for output in after.graph.output] == [output.name for output in before.graph.output]
    assert not rewrite(model).modified
    assert ir.to_proto(model) == after
    if before.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
        return  # see quirks.FLOAT64_FUSED_MATMUL
    rng = np.random.default_rng(0)
    feed = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in before.graph.input}
    arrays = {name: rng.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in feed.items()}
    if kind is AvoidRuntimeFaults:
        assert run(after, arrays)["y"].shape == (0, 3)
        return
    if kind is WidenBfloat16:  # ONNX Runtime has no kernel for the model before
        np.testing.assert_allclose(run(after, arrays)["y"], -arrays["x"], rtol=2**-8)
        return
    got, want = (run(_lowered(proto), arrays) for proto in (after, before))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_a_pass_leaves_other_models_alone(kind: type[GraphPass]) -> None:
    model = ir.from_proto(NEGATED)
    rewrite = _made(kind, ir.from_proto(EXAMPLES[kind].model()))
    assert not rewrite(model).modified
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(NEGATED))


class _Refuse(NodePass):
    """Raise for every Neg."""

    operators = ("Neg",)
    label = "refused"

    def rewrite_node(self, e: object, node: ir.Node) -> bool:  # noqa: ARG002 - as the base class
        raise ArgumentError(f"{node.op_type} is refused.")


def test_errors_of_passes_keep_their_type() -> None:
    with pytest.raises(ArgumentError, match=r"^Neg is refused\.$"):
        run_passes(ir.from_proto(NEGATED), [_Refuse()])
