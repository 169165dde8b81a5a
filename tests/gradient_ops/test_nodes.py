"""Gradient nodes of `ai.onnx.preview.training`, replaced by plain operators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.preview_training import close, drawn, lower, lowered, model, wide

# -- ONNX's own tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_models_of_the_standard(name: str) -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "simple" / name

    def arrays(kind: str) -> list[np.ndarray]:
        files = sorted((folder / "test_data_set_0").glob(f"{kind}_*.pb"))
        return [numpy_helper.to_array(onnx.load_tensor(f)) for f in files]

    done = lowered(onnx.load(folder / "model.onnx"))
    got = run(done, dict(zip([v.name for v in done.graph.input], arrays("input"), strict=True)))
    for result, want in zip(got.values(), arrays("output"), strict=True):
        assert result.dtype == want.dtype and result.shape == want.shape
        np.testing.assert_allclose(result, want, rtol=1e-6)


# -- values ------------------------------------------------------------------------------------------------------------

NET = "h = Conv<pads=[1,1,1,1]>(x, w) p = Relu(h) q = GlobalAveragePool(p) f = Flatten(q) y = Gemm(f, z) "
INPUTS = "float[2,3,6,6] x, float[4,3,3,3] w, float[4,2] z"
SHAPES = {"x": (2, 3, 6, 6), "w": (4, 3, 3, 3), "z": (4, 2)}


def head(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return h.relu().mean((2, 3)) @ z


def net(x: torch.Tensor, w: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return head(F.conv2d(x, w, padding=1), z)


def test_parameters_share_the_forward_part() -> None:
    body = NET + 'dw, dz = T.Gradient<xs=["w", "z"], zs=["x"], y="y">(w, z, x)'
    done = lower(body, INPUTS, "float[2,2] y, float[] dw, float[4,2] dz")
    feed = drawn(**SHAPES)
    leaves = wide(feed)
    y = net(**leaves)
    got = run(done, feed)
    close(got["y"], y)
    for name, want in zip(("dw", "dz"), torch.autograd.grad(y.sum(), [leaves["w"], leaves["z"]]), strict=True):
        close(got[name], want)
    originals = [n for n in done.graph.node if "h" in n.output]
    assert len(originals) == 1 and sum(n.op_type == "Relu" for n in done.graph.node) == 1
    assert not [n for n in done.graph.node if "anew" in n.name]
    assert json.loads(done.metadata_props[0].value) == {"w": "dw", "z": "dz"}


def test_intermediate_tensor_is_a_variable() -> None:
    """dy/dh, and dy/dw at constant h: the members of xs and zs are independent of each other."""
    body = f"""{NET}
        dh, dz = T.Gradient<xs=["h", "z"], y="y">(h, z)
        again, dw = T.Gradient<xs=["h", "w"], zs=["z"], y="y">(h, w, z)
        still = T.Gradient<xs=["w"], zs=["h", "z"], y="y">(w, h, z)
        own = T.Gradient<xs=["y"], y="y">(y)
    """
    with pytest.warns(UserWarning, match=r"'y' does not depend on 'w'") as caught:
        done = lower(body, INPUTS, "float[] dh, float[] dz, float[] again, float[] dw, float[] still, float[] own")
    assert len(caught) == 2
    feed = drawn(**SHAPES)
    leaves = wide(feed)
    h = F.conv2d(leaves["x"], leaves["w"], padding=1)
    dh, dz = torch.autograd.grad(head(h, leaves["z"]).sum(), [h, leaves["z"]])
    got = run(done, feed)
    close(got["dh"], dh)
    close(got["dz"], dz)
    assert np.array_equal(got["again"], got["dh"])
    assert np.array_equal(got["dw"], np.zeros(SHAPES["w"])) and np.array_equal(got["still"], got["dw"])
    assert np.array_equal(got["own"], np.ones((2, 2)))


def test_gradients_at_other_values() -> None:
    """At another h (of another size), at another z, and at values that depend on the variables themselves."""
    body = f"""{NET}
        dh, dz = T.Gradient<xs=["h", "z"], y="y">(h1, z1)
        dw, dz2 = T.Gradient<xs=["w", "z"], zs=["x"], y="y">(w, z1, x)
        w1 = Add(w, dw)
        dw1, dx1 = T.Gradient<xs=["w", "x"], zs=["z"], y="y">(w1, x, z)
    """
    outputs = "float[2,2] y, float[1,4,5,3] dh, float[4,2] dz, float[] dw, float[] dz2, float[] dw1, float[] dx1"
    done = lower(body, f"{INPUTS}, float[1,4,5,3] h1, float[4,2] z1", outputs)
    feed = drawn(**SHAPES, h1=(1, 4, 5, 3), z1=(4, 2))
    t = wide(feed)
    third = torch.autograd.grad(net(t["x"], t["w"], t["z1"]).sum(), [t["w"], t["z1"]])
    w1 = (t["w"] + third[0]).detach().requires_grad_()
    want = [*torch.autograd.grad(head(t["h1"], t["z1"]).sum(), [t["h1"], t["z1"]]), *third]
    want += torch.autograd.grad(net(t["x"], w1, t["z"]).sum(), [w1, t["x"]])
    y, *gradients = run(done, feed).values()
    close(y, net(t["x"], t["w"], t["z"]))
    for got, expected in zip(gradients, want, strict=True):
        close(got, expected, 5e-6)
    assert [n.name for n in done.graph.node if n.op_type == "Conv" and n.name.endswith("anew")]


def test_two_variables_of_one_value() -> None:
    """Each partial derivative, in the main graph and in a function that is called with one tensor twice."""
    tail = """
        <domain: "local", opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        slope (a, b) => (y, da, db) {
            s = Mul(a, b)
            y = Mul(s, a)
            da, db = ai.onnx.preview.training.Gradient<xs=["a", "b"], y="y">(a, b)
        }"""
    body = """
        s = Mul(p, q)
        y = Mul(s, p)
        dp, dq = T.Gradient<xs=["p", "q"], y="y">(q, q)
        y2, da, db = local.slope(p, p)
        y3, da3, db3 = local.slope(q, p)
        dd = T.Gradient<xs=["p"], y="da">(p)
    """
    names = ("dp", "dq", "da", "db", "da3", "db3", "dd")
    outputs = ", ".join(f"float[5] {n}" for n in names)
    done = lower(body, "float[5] p, float[5] q", outputs, tail=tail)
    assert not any(n.op_type == "Identity" for n in done.graph.node if "p" in n.input)
    feed = drawn(p=(5,), q=(5,))
    got = run(done, feed)
    for (first, second), (a, b) in {("dp", "dq"): "qq", ("da", "db"): "pp", ("da3", "db3"): "qp"}.items():
        u, v = (torch.tensor(feed[n]).double().requires_grad_() for n in (a, b))
        for name, want in zip((first, second), torch.autograd.grad((u * v * u).sum(), [u, v]), strict=True):
            close(got[name], want)
    p = torch.tensor(feed["p"]).double().requires_grad_()
    a = p.clone()  # inside the function a and b are two variables, and the result depends on p through both
    (da,) = torch.autograd.grad((a * p * a).sum(), a, create_graph=True)
    close(got["dd"], torch.autograd.grad(da.sum(), p)[0])


def test_gradient_of_a_gradient() -> None:
    """The second-order example of the specification, with a convolution, and third order."""
    body = """
        c = Conv(x, w)
        t = Tanh(c)
        m = Mul(t, l)
        o = ReduceSum<keepdims=0>(m)
        gx, gw = T.Gradient<xs=["x", "w"], zs=["l"], y="o">(x, w, l)
        hx, hw = T.Gradient<xs=["x", "w"], zs=["l"], y="gw">(x, w, l)
        k = T.Gradient<xs=["x"], zs=["w", "l"], y="hw">(x, w, l)
    """
    shapes = {"x": (2, 2, 5, 5), "w": (3, 2, 3, 3), "l": (2, 3, 3, 3)}
    declared = ", ".join(f"float[{','.join(map(str, s))}] {n}" for n, s in shapes.items())
    outputs = ("gx", "gw", "hx", "hw", "k")
    done = lower(body, declared, ", ".join(f"float[] {n}" for n in outputs))
    feed = drawn(**shapes)
    x, w, weight = wide(feed).values()
    first = torch.autograd.grad((F.conv2d(x, w).tanh() * weight).sum(), [x, w], create_graph=True)
    second = torch.autograd.grad(first[1].sum(), [x, w], create_graph=True)
    third = torch.autograd.grad(second[1].sum(), x)
    for result, want in zip(run(done, feed).values(), (*first, *second, *third), strict=True):
        close(result, want, 2e-5)


def test_second_gradient_at_other_values() -> None:
    """The nodes of the first gradient are recomputed, too."""
    body = """
        c = Conv(x, w)
        t = Tanh(c)
        g = T.Gradient<xs=["w"], zs=["x"], y="t">(w, x)
        h = T.Gradient<xs=["w"], zs=["x"], y="g">(w1, x)
    """
    done = lower(body, "float[2,2,5] x, float[3,2,3] w, float[3,2,3] w1", "float[] g, float[3,2,3] h")
    feed = drawn(x=(2, 2, 5), w=(3, 2, 3), w1=(3, 2, 3))
    t = wide(feed)
    (g,) = torch.autograd.grad(F.conv1d(t["x"], t["w1"]).tanh().sum(), t["w1"], create_graph=True)
    close(run(done, feed)["h"], torch.autograd.grad(g.sum(), t["w1"])[0], 1e-5)


# -- interface ---------------------------------------------------------------------------------------------------------

SQUARE = """
    dw = T.Gradient<xs=["w"], zs=["x"], y="y">(w, x)
    s = Mul(w, x)
    y = Mul(s, s)
"""
"""The Gradient precedes the nodes that it differentiates: an attribute requires no order."""


def test_unused_results_cost_nothing() -> None:
    """A result without a name is not computed."""
    body = """
        s = Det(m)
        y = Mul(s, w)
        , dw = T.Gradient<xs=["m", "w"], y="y">(m, w)
    """
    done = lower(body, "float[2,2] m, float w", "float dw")
    assert [n.op_type for n in done.graph.node if n.op_type != "Identity"].count("Det") == 1
    feed = drawn(m=(2, 2), w=())
    close(run(done, feed)["dw"], torch.tensor(feed["m"]).double().det())


def test_kinds_of_models(tmp_path: Path) -> None:
    """Paths and protos give self-contained protos; onnx_ir models give onnx_ir models, with weights still external."""
    given = model(SQUARE, "float[4] x", "float[4] y, float[4] dw")
    weight = drawn(w=(4,))["w"]
    given.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = tmp_path / "model.onnx"
    copy = onnx.ModelProto.FromString(given.SerializeToString())
    onnx.save(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    loaded = ir.load(path)
    before = ir.to_proto(loaded).SerializeToString()
    results = [og.transforms.lower_gradient_ops(m) for m in (given, path, str(path), loaded)]
    assert ir.to_proto(loaded).SerializeToString() == before
    assert [type(r) for r in results] == [onnx.ModelProto] * 3 + [ir.Model]
    assert isinstance(results[3].graph.initializers["w"].const_value, ir.ExternalTensor)
    feed = drawn(x=(4,))
    ir.save(results[3], tmp_path / "lowered.onnx")
    for result in (*results[:3], tmp_path / "lowered.onnx"):
        close(run(result, feed)["dw"], torch.tensor(2 * weight * feed["x"] ** 2))


def test_stored_inputs_can_still_be_fed() -> None:
    given = model(SQUARE, "float[4] w, float[4] x, int64[1] shape", "float[4] y, float[4] dw")
    given.graph.node.add(op_type="Reshape", input=["y", "shape"], output=["r"])
    given.graph.output.add(name="r").type.tensor_type.elem_type = 1
    stored, other = drawn(w=(4,)) | {"shape": np.array([4])}, np.arange(4, dtype=np.float32)
    given.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    done = lowered(given)
    feed = drawn(x=(4,))
    for w, values in ((stored["w"], feed), (other, feed | {"w": other})):
        close(run(done, values)["dw"], torch.tensor(2 * w * feed["x"] ** 2))


def test_batch_normalization_in_training_mode() -> None:
    """The gradient includes that of the batch statistics."""
    body = """
        y, m, v = BatchNormalization<training_mode=1>(x, scale, bias, mean, var)
        c = Mul(y, y)
        z = Mul(c, y)
        dx, ds = T.Gradient<xs=["x", "scale"], zs=["bias", "mean", "var"], y="z">(x, scale, bias, mean, var)
    """
    inputs = "float[4,3,5] x, float[3] scale, float[3] bias, float[3] mean, float[3] var"
    done = lower(body, inputs, "float[] dx, float[] ds")
    feed = drawn(x=(4, 3, 5), scale=(3,), bias=(3,), mean=(3,)) | {"var": np.ones(3, np.float32)}
    t = wide(feed)
    z = F.batch_norm(t["x"], None, None, t["scale"], t["bias"], training=True) ** 3
    for result, want in zip(run(done, feed).values(), torch.autograd.grad(z.sum(), [t["x"], t["scale"]]), strict=True):
        close(result, want, 1e-5)


def test_other_transformations_name_the_remedy() -> None:
    given = model(SQUARE, "float[4] w, float[4] x", "float[4] y, float[4] dw")
    with pytest.raises(og.errors.ModelError, match="lower_gradient_ops"):
        og.augment(given, wrt=["w"])
    second = og.vjp(og.transforms.lower_gradient_ops(given), wrt=["x"], of="dw", cotangents="ones")
    feed = drawn(w=(4,), x=(4,))
    close(run(second, feed)["x_grad"], torch.tensor(4 * feed["w"] * feed["x"]))


# -- refusals ----------------------------------------------------------------------------------------------------------

INVALID = {
    'dw = T.Gradient<xs=["v"], y="y">(w)': r"names 'v' in xs, but its graph has no such tensor",
    'dw = T.Gradient<xs=["weights"], y="y">(w)': r"Did you mean 'weight'",
    'dw = T.Gradient<xs=["w"], y="Z">(w)': r"names 'Z' in y, but its graph has no such tensor. It must be one",
    'dw = T.Gradient<xs=["w", "x"], y="y">(w)': r"has 1 inputs, but xs and zs name 2 tensors",
    'dw = T.Gradient<xs=["w"], zs=["w"], y="y">(w, w)': r"names 'w' twice",
    'dw, dx = T.Gradient<xs=["w"], y="y">(w)': r"has 2 outputs, but xs names 1 tensors",
    'dw = T.Gradient<xs=["w"]>(w)': r"lacks its attribute 'y'",
    'dw = T.Gradient<xs=["n"], y="y">(n)': r"by 'n', which is INT64",
    'dw = T.Gradient<xs=["w"], y="i">(w)': r"differentiates 'i', which is INT64",
    'dw = T.Gradient<xs=["w"], y="y">(d)': r"takes 'd', which is DOUBLE, for 'w', which is FLOAT.* Insert a Cast",
    'dw = T.Gradient<xs=["w"], y="l">(w) l = Mul(dw, w)': r"y of Gradient node .* is computed from its own gradient",
}


@pytest.mark.parametrize("node", INVALID)
def test_invalid_nodes(node: str) -> None:
    body = f"weight = Mul(w, x) y = Mul(weight, x) i = Cast<to=7>(y) {node}"
    with pytest.raises(og.errors.ModelError, match=INVALID[node]):
        og.transforms.lower_gradient_ops(model(body, "float[4] w, float[4] x, int64[4] n, double[4] d", "float[] dw"))


def test_all_blocking_nodes_are_reported() -> None:
    body = """
        u = local.Mystery(w)
        y = Mul(u, x)
        dw = T.Gradient<xs=["w"], y="y">(w)
        v = local.Riddle(x)
        z = Mul(v, x)
        dx = T.Gradient<xs=["x"], y="z">(x)
    """
    with pytest.raises(og.errors.DifferentiationError) as caught:
        og.transforms.lower_gradient_ops(model(body, "float[4] w, float[4] x", "float[] dw, float[] dx"))
    assert [p.op_type for p in caught.value.problems] == ["local::Mystery", "local::Riddle"]
    for problem, node in zip(caught.value.problems, ("Gradient_2", "Gradient_5"), strict=True):
        assert f"Choose y of Gradient node '{node}' before it or its xs after it" in problem.hint
        assert problem.path and "wrt" not in str(problem)


SLOPE = """<domain: "local", opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    slope (a) => (da) { y = Mul(a, a) da = ai.onnx.preview.training.Gradient<xs=["a"], y="y">(a) }"""
NESTED = {
    "r = local.slope(w)": (SLOPE, r"then_branch of If 'If_1'"),
    'r = T.Gradient<xs=["w"], y="y">(w)': ("", r"then_branch of If that makes 'dw'"),
}


@pytest.mark.parametrize("node", NESTED, ids=["in a function that a branch calls", "in a branch"])
def test_gradients_in_bodies_are_refused(node: str) -> None:
    tail, path = NESTED[node]
    body = f"""y = Mul(w, w)
        dw = If (b) <then_branch = one () => (float[4] r) {{ {node} }},
                     else_branch = two () => (float[4] s) {{ s = Identity(w) }}>"""
    with pytest.raises(og.errors.DifferentiationError, match=path) as caught:
        og.transforms.lower_gradient_ops(model(body, "bool b, float[4] w", "float[] dw", tail=tail))
    assert "into the main graph" in str(caught.value)


def test_values_of_other_sizes() -> None:
    """Computed sizes are those of the given value, not of the tensor that it replaces."""
    body = """
        c = Conv(x, w)
        s = Shape<start=0, end=2>(c)
        e = Constant<value_ints=[-1]>()
        t = Concat<axis=0>(s, e)
        r = Reshape(c, t)
        y = Softmax<axis=2>(r)
        z = Mul(y, r)
        dc = T.Gradient<xs=["c"], y="z">(c1)
    """
    done = lower(body, "float[2,3,6] x, float[4,3,3] w, float[1,5,7] c1", "float[] z, float[] dc")
    feed = drawn(x=(2, 3, 6), w=(4, 3, 3), c1=(1, 5, 7))
    c1 = wide(feed)["c1"]
    close(run(done, feed)["dc"], torch.autograd.grad((c1.softmax(2) * c1).sum(), c1)[0])
