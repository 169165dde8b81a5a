"""Damage ONNX models in the ways in which a file can be wrong: every field takes odd values, every reference goes astray."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Error as MessageError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tests.fuzz.seeds import Seed, Seeds

Mutation = Callable[[ModelProto, random.Random], None]

INTEGERS = (0, 1, -1, 2, 3, 7, -2, 64, 20_000, 10**9, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e38, 1e-45, 1e300, 0.5)
WORDS = [*b"NOTSET SAME_UPPER linear reflect sum ij,jk->ik ..->".split(), b"", b"\xff\xfe\x00", b"x" * 10**5]
NAMES = ("", "x", "y", "nowhere", "x_grad", "y_grad", "\u00fc\U0001f600", "a" * 10**4, "../../x", "*", "[", "\0", "NaN")
FORMULAS = "9**9**9 N%0 \u00fc N -N 2**2**40 N*N N//0 1e999 N+1 -1 0 None __import__('os') N-N max(N, floor(N/2)"
DIMENSIONS = [*FORMULAS.split(), "", "(" * 300, "N" * 10**4, "+".join("abcdefgh" * 50), "lambda: 0", "a b"]
DOMAINS = ["", *"ai.onnx com.microsoft ai.onnx.ml ai.onnx.preview.training f onnx_convgrad pkg.odd \u00fc".split()]
FILES = (
    "weights.bin .. . ../secret.bin /etc/passwd folder link.bin pipe.bin missing /dev/zero ~ folder/../../secret.bin"
)
LOCATIONS = [*FILES.split(), "", "\0", "a" * 5000]
KEYS = "gradients updates loops labels preprocessing training adapters quantization statistics tangents manifest odd".split()
TEXTS = ["", *'{ [] {} null NaN {"y":{}} {"x":"y"} {"x":1} [["y"]] \u00fc 1e999'.split(), "[" * 10**5]
KINDS = [*range(-1, 30), 99, 2**31 - 1]
OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas()})

MUTATIONS: list[Mutation] = []


def mutation(times: int = 1) -> Callable[[Mutation], Mutation]:
    """Add a function to the table of mutations, `times` as likely as others."""

    def add(function: Mutation) -> Mutation:
        MUTATIONS.extend([function] * times)
        return function

    return add


def mutant(seeds: Seeds, r: random.Random, base: Seed | None = None) -> bytes:
    """Draw a seed and damage it in one to four places."""
    base = base or seeds.draw(r)
    model = base.model()
    if r.random() < 0.4:
        store_inputs(model, base, r)
    for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
        if r.random() < 0.03:
            splice(model, seeds.draw(r).model(), r)
            continue
        # Where there is nothing of the kind, or the field cannot hold the value, the model stays as it is.
        with contextlib.suppress(Exception):
            r.choice(MUTATIONS)(model, r)
    try:
        data = model.SerializeToString()
    except MessageError:  # nested too deeply
        data = base.data
    if r.random() < 0.06:
        with contextlib.suppress(Exception):
            return damage(data, r)
    return data


def damage(data: bytes, r: random.Random) -> bytes:
    """Damage the file of a model, or make a name in it invalid UTF-8."""
    if r.random() < 0.8:
        return scrambled(data, r)
    names = [word for n in nodes_of(onnx.load_from_string(data)) for word in (n.op_type, n.name, *n.input, *n.output)]
    word = r.choice([*filter(None, names), "x"]).encode()
    return data.replace(word, b"\xff" * len(word), r.choice((1, -1)))


def scrambled(data: bytes, r: random.Random) -> bytes:
    """Cut, flip, repeat or drop bytes of any file."""
    changed, at = bytearray(data), r.randrange(len(data) + 1)
    match r.randrange(4):
        case 0:
            del changed[at:]
        case 1:
            for _ in range(r.randint(1, 8) if changed else 0):
                changed[r.randrange(len(changed))] = r.randrange(256)
        case 2:
            changed[at:at] = changed[at : at + r.randint(1, 40)]
        case 3:
            del changed[at : at + r.randint(1, 8)]
    return bytes(changed)


# -- Parts of a model --------------------------------------------------------------------------------------------------


def graphs_of(model: ModelProto) -> list[GraphProto]:
    """The graph and those nested in it."""
    found, stack = [], [model.graph]
    while stack:
        found.append(stack.pop())
        for node in found[-1].node:
            for a in node.attribute:
                stack.extend([a.g] if a.type == AttributeProto.GRAPH else a.graphs)
    return found


def bodies_of(model: ModelProto) -> list[Any]:
    """Everything that has nodes: graphs and functions."""
    return [*graphs_of(model), *model.functions]


def nodes_of(model: ModelProto) -> Iterator[NodeProto]:
    for body in bodies_of(model):
        yield from body.node


def a_node(model: ModelProto, r: random.Random) -> NodeProto:
    return r.choice(list(nodes_of(model)))


def a_name(model: ModelProto, r: random.Random) -> str:
    """A name of the model, or an odd one."""
    if r.random() < 0.25:
        return r.choice(NAMES)
    body = r.choice(bodies_of(model))
    names = [name for n in body.node for name in (*n.input, *n.output)]
    if isinstance(body, GraphProto):
        names += [v.name for v in (*body.input, *body.output, *body.initializer)]
    return r.choice(names)


def a_value(model: ModelProto, r: random.Random) -> ValueInfoProto:
    graph = r.choice(graphs_of(model))
    return r.choice([*graph.input, *graph.output, *graph.value_info])


def a_tensor(model: ModelProto, r: random.Random) -> TensorProto:
    """A stored tensor: an initializer or an attribute."""
    tensors = [t for g in graphs_of(model) for t in g.initializer]
    return r.choice(tensors + [a.t for n in nodes_of(model) for a in n.attribute if a.type == AttributeProto.TENSOR])


def shuffle(items: MutableSequence[Any], r: random.Random, odd: Callable[[], Any]) -> None:
    """Drop, repeat, swap, replace or append members of a repeated field of scalars; an empty one gets a member."""
    values, at = list(items), r.randrange(max(len(items), 1))
    match r.randrange(6) if values else 5:
        case 0:
            del values[at]
        case 1:
            values.insert(at, values[at])
        case 2:
            values.reverse()
        case 3 | 4:
            values[at] = odd()
        case 5:
            values.append(odd())
    del items[:]
    items.extend(values)


# -- Attributes --------------------------------------------------------------------------------------------------------


def odd_attribute(name: str, kind: int, r: random.Random) -> AttributeProto:
    """An attribute of this type with an odd value."""
    a, length = AttributeProto(name=name, type=kind), r.choice((0, 1, 2, 3, 4, 5, 8, 8, 10**5))
    match kind:
        case AttributeProto.INT:
            a.i = r.choice(INTEGERS)
        case AttributeProto.FLOAT:
            a.f = r.choice(FLOATS)
        case AttributeProto.STRING:
            a.s = r.choice(WORDS)
        case AttributeProto.TENSOR:
            a.t.CopyFrom(odd_tensor(TensorProto(), r))
        case AttributeProto.GRAPH:
            a.g.name = "odd"
        case AttributeProto.SPARSE_TENSOR:
            a.sparse_tensor.CopyFrom(odd_sparse(r))
        case AttributeProto.INTS:
            a.ints.extend([r.choice(INTEGERS)] * length if r.random() < 0.5 else _cycle(INTEGERS, length, r))
        case AttributeProto.FLOATS:
            a.floats.extend(_cycle(FLOATS, length, r))
        case AttributeProto.STRINGS:
            a.strings.extend(_cycle(WORDS[:-1], length, r))
    return a


def _cycle(choices: Sequence[Any], length: int, r: random.Random) -> list[Any]:
    """Up to eight drawn values, repeated to this length."""
    drawn = r.choices(choices, k=min(length, 8))
    return list(itertools.islice(itertools.cycle(drawn), length))


@mutation(6)
def attribute_value(model: ModelProto, r: random.Random) -> None:
    a = r.choice([a for n in nodes_of(model) for a in n.attribute])
    if a.ints and r.random() < 0.7:
        shuffle(a.ints, r, lambda: r.choice(INTEGERS))
    elif a.type == AttributeProto.TENSOR and r.random() < 0.8:
        odd_tensor(a.t, r)
    else:
        a.CopyFrom(odd_attribute(a.name, a.type, r))


@mutation(3)
def attribute_of_schema(model: ModelProto, r: random.Random) -> None:
    """Add an attribute that the operator has, with an odd value."""
    node = a_node(model, r)
    declared = onnx.defs.get_schema(node.op_type, 21, node.domain).attributes if node.domain == "" else {}
    name, known = r.choice(sorted(declared.items()))
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, odd_attribute(name, known.type.value, r)])


@mutation(2)
def attribute_type(model: ModelProto, r: random.Random) -> None:
    a = r.choice([a for n in nodes_of(model) for a in n.attribute])
    if r.random() < 0.5:
        a.type = r.randrange(15)
    else:
        a.CopyFrom(odd_attribute(a.name, r.randrange(1, 12), r))


@mutation(2)
def attribute_list(model: ModelProto, r: random.Random) -> None:
    """Drop an attribute, give one twice, refer to one, rename one."""
    node = r.choice([n for n in nodes_of(model) if n.attribute])
    a = r.choice(node.attribute)
    match r.randrange(4):
        case 0:
            node.attribute.remove(a)
        case 1:
            node.attribute.add().CopyFrom(odd_attribute(a.name, a.type, r) if r.random() < 0.5 else a)
        case 2:
            a.CopyFrom(AttributeProto(name=a.name, type=a.type, ref_attr_name=r.choice(("alpha", "", a.name))))
        case 3:
            a.name = r.choice(NAMES)


# -- Nodes -------------------------------------------------------------------------------------------------------------


@mutation(5)
def node_inputs(model: ModelProto, r: random.Random) -> None:
    shuffle(a_node(model, r).input, r, lambda: a_name(model, r))


@mutation(3)
def node_outputs(model: ModelProto, r: random.Random) -> None:
    shuffle(a_node(model, r).output, r, lambda: a_name(model, r))


@mutation(4)
def node_operator(model: ModelProto, r: random.Random) -> None:
    node = a_node(model, r)
    match r.randrange(5):
        case 0:
            node.domain = r.choice(DOMAINS)
        case 1:
            node.name = a_name(model, r)
        case 2:
            node.op_type, node.overload = (
                r.choice(("", "Gradient", "ConvInputGrad", "F", "\0", "If")),
                r.choice(("", "z")),
            )
        case _:
            node.op_type = r.choice(OPERATORS)


@mutation(3)
def node_list(model: ModelProto, r: random.Random) -> None:
    """Drop, repeat, move or add a node."""
    body = r.choice(bodies_of(model))
    nodes = list(body.node)
    match r.randrange(4):
        case 0:
            nodes.remove(r.choice(nodes))
        case 1:
            nodes.append(r.choice(nodes))
        case 2:
            r.shuffle(nodes)
        case 3:
            names = [a_name(model, r) for _ in range(r.randrange(4))]
            nodes.insert(r.randrange(len(nodes) + 1), helper.make_node(r.choice(OPERATORS), names, [a_name(model, r)]))
    nodes = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del body.node[:]
    body.node.extend(nodes)


# -- Types and shapes --------------------------------------------------------------------------------------------------


@mutation(6)
def shape(model: ModelProto, r: random.Random) -> None:
    value = a_value(model, r)
    dims = value.type.tensor_type.shape.dim
    match r.randrange(7):
        case 0:
            value.type.tensor_type.ClearField("shape")
        case 1:
            dims.add().dim_value = r.choice(INTEGERS)
        case 2:
            del dims[r.randrange(len(dims))]
        case 3:
            r.choice(dims).Clear()
        case 4 | 5:
            r.choice(dims).dim_param = r.choice(DIMENSIONS)
        case 6:
            r.choice(dims).dim_value = r.choice(INTEGERS)


@mutation(3)
def value_type(model: ModelProto, r: random.Random) -> None:
    kind = a_value(model, r).type
    inner = onnx.TypeProto.FromString(kind.SerializeToString())
    match r.randrange(8):
        case 0:
            kind.sequence_type.elem_type.CopyFrom(inner)
        case 1:
            kind.optional_type.elem_type.CopyFrom(inner)
        case 2:
            kind.map_type.key_type = r.choice(KINDS)
            kind.map_type.value_type.CopyFrom(inner)
        case 3:
            kind.sparse_tensor_type.elem_type = r.choice(KINDS)
        case 4:
            kind.Clear()
        case 5:
            kind.denotation = r.choice(NAMES)
        case _:
            kind.tensor_type.elem_type = r.choice(KINDS)


# -- Weights -----------------------------------------------------------------------------------------------------------


def odd_tensor(t: TensorProto, r: random.Random) -> TensorProto:
    """Make the parts of a stored tensor contradict each other."""
    match r.randrange(10):
        case 0:
            t.raw_data = t.raw_data[: r.randrange(len(t.raw_data) + 1)] + b"\x01" * r.choice((0, 1, 4, 100))
        case 1:
            shuffle(t.dims, r, lambda: r.choice(INTEGERS))
        case 2:
            t.data_type = r.choice(KINDS)
        case 3:
            t.ClearField(r.choice(("raw_data", "dims", "data_type", "name", "float_data", "int64_data", "int32_data")))
        case 4:
            getattr(t, r.choice(("float_data", "int32_data", "int64_data", "double_data", "uint64_data"))).extend(
                [1, 2]
            )
        case 5:
            t.string_data.extend([b"\xff", b""])
        case 6:
            t.segment.begin, t.segment.end = r.choice(INTEGERS), r.choice(INTEGERS)
        case 7:
            t.data_location = 1
            t.ClearField("raw_data")
            entries = {"location": LOCATIONS, "offset": INTEGERS, "length": INTEGERS, "checksum": NAMES}
            for key in ("location", *r.sample(sorted(entries), r.randrange(3))):
                t.external_data.add(key=key, value=str(r.choice(entries[key])))
        case 8:
            t.CopyFrom(numpy_helper.from_array(np.array(r.choices(INTEGERS, k=r.randrange(5)), np.int64), t.name))
        case 9:
            kind = helper.tensor_dtype_to_np_dtype(t.data_type or TensorProto.FLOAT)
            t.CopyFrom(
                numpy_helper.from_array(np.full(r.choice([(), (0,), (1, 1), (2, 0, 3)]), 1).astype(kind), t.name)
            )
    return t


def odd_sparse(r: random.Random, name: str = "s") -> onnx.SparseTensorProto:
    count = r.randrange(3)
    values = helper.make_tensor(name, 1, [count], [1.0] * count)
    indices = helper.make_tensor("i", 7, [count], r.choices(INTEGERS, k=count))
    return helper.make_sparse_tensor(values, indices, r.choices(INTEGERS, k=r.randrange(3)))


@mutation(5)
def stored_tensor(model: ModelProto, r: random.Random) -> None:
    odd_tensor(a_tensor(model, r), r)


@mutation(2)
def stored_integers(model: ModelProto, r: random.Random) -> None:
    """Change one number of a stored operand: axes, sizes, pads ..."""
    t = r.choice([t for t in model.graph.initializer if t.data_type == TensorProto.INT64])
    values = numpy_helper.to_array(t).copy()
    values.flat[r.randrange(values.size)] = r.choice(INTEGERS)
    t.CopyFrom(numpy_helper.from_array(values, t.name))


@mutation(3)
def initializer_list(model: ModelProto, r: random.Random) -> None:
    graph = r.choice(graphs_of(model))
    match r.randrange(6):
        case 0:
            del graph.initializer[r.randrange(len(graph.initializer))]
        case 1:
            graph.initializer.add().CopyFrom(a_tensor(model, r))
        case 2:
            r.choice(graph.initializer).name = a_name(model, r)
        case 3:
            graph.sparse_initializer.add().CopyFrom(odd_sparse(r, a_name(model, r)))
        case 4:
            t = r.choice(graph.initializer)
            graph.input.append(helper.make_tensor_value_info(t.name, r.choice((1, t.data_type)), t.dims))
        case 5:
            graph.initializer.add(name=a_name(model, r), data_type=1, dims=[1], float_data=[1.0])


def store_inputs(model: ModelProto, base: Seed, r: random.Random) -> None:
    """Make inputs stored operands: all, or only the integers."""
    graph, every = model.graph, r.random() < 0.3
    for value in list(graph.input):
        array = base.feeds.get(value.name)
        if array is not None and array.dtype != object and array.size < 10**4 and (every or array.dtype.kind in "iub"):
            graph.initializer.append(numpy_helper.from_array(array, value.name))
            graph.input.remove(value)


# -- Graphs ------------------------------------------------------------------------------------------------------------


@mutation(3)
def interface(model: ModelProto, r: random.Random) -> None:
    """Repeat, drop, swap or rename inputs and outputs."""
    graph = r.choice(graphs_of(model))
    some, others = r.choice([(graph.input, graph.output), (graph.output, graph.input)])
    match r.randrange(6):
        case 0:
            del some[r.randrange(len(some))]
        case 1:
            some.add().CopyFrom(r.choice(some))
        case 2:
            some.add().CopyFrom(r.choice(others))
        case 3:
            r.choice(some).name = a_name(model, r)
        case 4:
            some.add(name=a_name(model, r))
        case 5:
            del some[:]


@mutation(2)
def subgraph(model: ModelProto, r: random.Random) -> None:
    """Swap, empty, nest or shadow the body of a control-flow node; wrap a node in an If."""
    graph, choice = r.choice(graphs_of(model)), r.randrange(5)
    holders = [a for n in nodes_of(model) for a in n.attribute if a.type == AttributeProto.GRAPH]
    if choice == 0:
        body = GraphProto.FromString(r.choice([*(a.g for a in holders), model.graph]).SerializeToString())
        r.choice(holders).g.CopyFrom(body)
    elif choice == 1:
        r.choice(holders).g.Clear()
    elif choice == 2:
        r.choice(r.choice(holders).g.node).output[0] = a_name(model, r)
    else:
        node = r.choice(graph.node)
        for _ in range(r.choice((1, 1, 2, 40))):
            outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
            body = helper.make_graph([node], "body", [], outputs)
            other = body if r.random() < 0.1 else helper.make_graph([], "other", [], outputs)
            inner = helper.make_node("If", [a_name(model, r)], node.output, then_branch=body, else_branch=other)
            node.CopyFrom(inner)


@mutation(2)
def function(model: ModelProto, r: random.Random) -> None:
    """Wrap a node in a function, let functions call themselves or each other, damage their headers."""
    choice = r.randrange(6)
    if choice <= 1 or not model.functions:
        node, name = a_node(model, r), f"F{len(model.functions)}"
        calls = [helper.make_node(name, ["a"], ["b"], domain="f") for _ in range(r.randrange(2))]
        body = [*calls, node]
        opsets = [*model.opset_import, helper.make_opsetid("f", 1)]
        names = [n for n in dict.fromkeys(node.input) if n]
        model.functions.append(helper.make_function("f", name, names, list(node.output), body, opsets, []))
        node.CopyFrom(helper.make_node(name, names, node.output, domain="f"))
        model.opset_import.append(helper.make_opsetid("f", 1))
        return
    chosen = r.choice(model.functions)
    if choice == 2:
        for i in range(r.choice((3, 40))):  # each calls the next twice
            step = [helper.make_node(f"D{i + 1}", [a], [b], domain="f") for a, b in (("u", "v"), ("v", "w"))]
            model.functions.append(helper.make_function("f", f"D{i}", ["u"], ["w"], step, chosen.opset_import))
        model.functions.append(helper.make_function("f", f"D{i + 1}", ["u"], ["w"], [], chosen.opset_import))
        chosen.node.append(helper.make_node("D0", chosen.output[:1], ["w"], domain="f"))
    elif choice == 3:
        shuffle(r.choice((chosen.input, chosen.output, chosen.attribute)), r, lambda: a_name(model, r))
    elif choice == 4:
        r.choice(chosen.opset_import).version = r.choice(INTEGERS)
    else:
        chosen.name, chosen.domain = r.choice(("", "F0", "Relu", "Conv")), r.choice(DOMAINS)


@mutation(3)
def header(model: ModelProto, r: random.Random) -> None:
    """Damage what stands around the graph."""
    match r.randrange(9):
        case 0:
            model.ir_version = r.choice(INTEGERS)
        case 1:
            r.choice(model.opset_import).version = r.choice((*INTEGERS, *range(1, 27)))
        case 2:
            model.opset_import.add(domain=r.choice(DOMAINS), version=r.choice((*INTEGERS, 17, 21)))
        case 3:
            del model.opset_import[:]
        case 4:
            model.graph.name = r.choice(NAMES)
        case 5:
            info = model.training_info.add()
            info.algorithm.CopyFrom(model.graph)
            info.update_binding.add(key=a_name(model, r), value=a_name(model, r))
        case 6:
            note = model.graph.quantization_annotation.add(tensor_name=a_name(model, r))
            note.quant_parameter_tensor_names.add(key=r.choice(("SCALE_TENSOR", "")), value=a_name(model, r))
        case 7:
            model.ClearField(r.choice(("graph", "ir_version", "opset_import", "functions")))
        case 8:
            model.producer_name, model.domain, model.model_version = (
                r.choice(NAMES),
                r.choice(DOMAINS),
                r.choice(INTEGERS),
            )


@mutation(2)
def metadata(model: ModelProto, r: random.Random) -> None:
    """Forge notes, above all those that this package writes."""
    value = r.choice(TEXTS)
    if r.random() < 0.5:
        a, b = a_name(model, r), a_name(model, r)
        value = f'{{"{a}": {r.choice(("1", "[]", f"[{chr(34)}{b}{chr(34)}]", f"{chr(34)}{b}{chr(34)}", "null"))}}}'
    notes = r.choice([model, model.graph, a_node(model, r), *model.functions]).metadata_props
    if notes and r.random() < 0.3:
        r.choice(notes).value = value
    else:
        notes.add(key=f"onnx_convgrad.{r.choice(KEYS)}", value=value)


def splice(model: ModelProto, other: ModelProto, r: random.Random) -> None:
    """Add another model's graph, and feed it a value of this one."""
    graph, added = model.graph, other.graph
    names = {v for n in graph.node for v in n.output}
    for node in added.node:
        for i in range(len(node.input)):
            if r.random() < 0.3 and names:
                node.input[i] = r.choice(sorted(names))
    for part in ("node", "initializer", "input", "output", "value_info"):
        getattr(graph, part).extend(getattr(added, part))
    if r.random() < 0.5:
        model.functions.extend(other.functions)
        model.opset_import.extend(o for o in other.opset_import if o.domain)
