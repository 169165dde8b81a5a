"""The API reference: a page for each name of the package, and one for each public module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import onnx_convgrad
from generator.docstrings import Docstring, parse
from generator.load import LIBRARIES, load

PACKAGE = "onnx_convgrad"
MORE_MODULES = ("federated.flower", "testing", "runtime", "pipeline.passes")
"""Modules that are public, besides those that the package imports by itself."""


@dataclass(frozen=True)
class Member:
    """A documented function, method or class.

    Attributes:
        name: Qualified, as a caller writes it: `onnx_convgrad.Trainer.fit`.
        thing: The object.
        doc: Its docstring.
        parameters: Parameter -> annotation, default (`inspect.Parameter.empty` if it has none), and description ("" if
            nothing describes it).
    """

    name: str
    thing: Any
    doc: Docstring
    parameters: dict[str, tuple[str, Any, str]]


def pages() -> dict[str, str]:
    """Page of the API, relative to the folder of the reference -> its Markdown."""
    written = {f"{name}.md": _page(name, thing) for name, thing in _names().items() if callable(thing)}
    for module in modules():
        written[f"{module.__name__.removeprefix(f'{PACKAGE}.')}.md"] = _module_page(module)
    return written


def modules() -> list[ModuleType]:
    """The public modules below the package that have names of their own."""
    found = [*filter(inspect.ismodule, _names().values()), *(load(f"{PACKAGE}.{name}") for name in MORE_MODULES)]
    return [module for module in found if public(module)]


def members() -> Iterator[Member]:
    """Every documented function, class and method."""
    for name, thing in _names().items():
        yield from _members(f"{PACKAGE}.{name}", thing)
    for module in modules():
        for name in public(module):
            yield from _members(f"{module.__name__}.{name}", getattr(module, name))


def public(module: ModuleType) -> list[str]:
    """The names of a module that the reference lists."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return [name for name in names if callable(getattr(module, name)) and not inspect.ismodule(getattr(module, name))]


@cache
def _names() -> dict[str, Any]:
    """The names of the package itself, and what they stand for."""
    modules = {name for name in onnx_convgrad.__all__ if f"{PACKAGE}.{name}" in LIBRARIES}
    return {
        name: load(f"{PACKAGE}.{name}") if name in modules else getattr(onnx_convgrad, name)
        for name in onnx_convgrad.__all__
    }


def _page(name: str, thing: Any) -> str:
    """The page of a function or class of the package itself."""
    return "\n".join(_entry(f"{PACKAGE}.{name}", thing, level=1))


def _module_page(module: ModuleType) -> str:
    doc = parse(module.__doc__)
    lines = [f"# {module.__name__}", "", doc.prose, ""]
    if doc.parameters:
        lines += ["Parameters that several functions share:", "", *_definitions(doc.parameters), ""]
    for name in public(module):
        lines += _entry(f"{module.__name__}.{name}", getattr(module, name), level=2)
    return "\n".join(lines)


def _members(name: str, thing: Any) -> Iterator[Member]:
    if not callable(thing) or inspect.ismodule(thing):
        return
    yield member(name, thing)
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for method in _methods(thing):
            yield member(f"{name}.{method}", getattr(thing, method), owner=thing)


def _methods(thing: type) -> list[str]:
    """Public methods that have a docstring of their own and do not override a documented one."""
    above = {n for base in thing.__mro__[1:] for n, v in vars(base).items() if getattr(v, "__doc__", None)}
    return [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_") and isinstance(value, (type(_methods), classmethod, staticmethod))
        and name not in above and getattr(thing, name).__doc__
    ]  # fmt: skip


def member(name: str, thing: Any, owner: type | None = None) -> Member:
    """Collect the documentation of a thing; descriptions come from `_described`."""
    doc = parse(inspect.getdoc(thing))
    described = _described(thing, doc, owner)
    parameters = {}
    for key, parameter in _signature(thing).items():
        kind = parameter.annotation
        text = "" if kind is parameter.empty else kind if isinstance(kind, str) else inspect.formatannotation(kind)
        parameters[key] = (text, parameter.default, described.get(key, ""))
    return Member(name, thing, doc, parameters)


def _signature(thing: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a caller gives."""
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return {}
    called = thing.__init__ if inspect.isclass(thing) else thing
    parameters = inspect.signature(called).parameters
    if inspect.isclass(thing) and set(parameters) == {"self", "args", "kwargs"}:
        return {}
    return {name: parameter for name, parameter in parameters.items() if name not in {"self", "cls"}}


def _described(thing: Any, doc: Docstring, owner: type | None) -> dict[str, str]:
    """Parameter -> description: from the shared parameters of its module, its bases, what it refers to, and itself."""
    home = load(getattr(thing, "__module__", PACKAGE) or PACKAGE)
    found = dict(parse(home.__doc__).parameters)
    if inspect.isclass(thing):
        for base in reversed(thing.__mro__[1:]):
            found |= parse(base.__doc__).parameters
        found |= parse(thing.__init__.__doc__).parameters
    for reference in re.findall(r"\b[Aa]s (?:for|of)\s+`([\w.]+)`", doc.prose + " ".join(doc.parameters.values())):
        found |= _referred(reference, thing, owner)
    return found | doc.parameters


def _referred(reference: str, thing: Any, owner: type | None) -> dict[str, str]:
    """Parameters of the function or method that a docstring refers to: a neighbor, or one of an enclosing package."""
    path = thing.__module__.split(".")
    home, _, name = reference.rpartition(".")
    named = [load(home)] if home.startswith(PACKAGE) else []
    packages = [load(".".join(path[:count])) for count in range(len(path), 0, -1)]
    for place in (owner, *named, *packages):
        other = getattr(place, name, None)
        if callable(other) and other is not thing and getattr(other, "__doc__", None):
            return _described(other, parse(inspect.getdoc(other)), owner if place is owner else None)
    return {}


def _properties(thing: type) -> dict[str, str]:
    """Public properties with a docstring -> its first paragraph."""
    kinds = (property, cached_property)
    found = {n: v.__doc__ for n, v in vars(thing).items() if not n.startswith("_") and isinstance(v, kinds)}
    return {name: parse(doc).prose for name, doc in found.items() if doc}


def _entry(name: str, thing: Any, level: int) -> list[str]:
    """The lines of a function or class, with its methods, below a heading of this level."""
    lines = _described_lines(member(name, thing), "#" * level, name.rpartition(".")[2], called=name)
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        properties = _properties(thing)
        if properties:
            lines += ["**Properties**", "", *_definitions(properties), ""]
        for method in _methods(thing):
            short = f"{thing.__name__}.{method}"
            entry = member(f"{name}.{method}", getattr(thing, method), owner=thing)
            lines += _described_lines(entry, "#" * (level + 1), short, called=short)
    return lines


def _described_lines(entry: Member, mark: str, heading: str, called: str) -> list[str]:
    lines = [f"{mark} {heading}", ""]
    if not (inspect.isclass(entry.thing) and issubclass(entry.thing, Exception)):
        lines += ["```python", _call(called, entry), "```", ""]
    lines += [entry.doc.prose, ""]
    described = {name: text for name, (_, _, text) in entry.parameters.items() if text}
    own = entry.doc.parameters if inspect.isclass(entry.thing) else {}
    attributes = {name: text for name, text in own.items() if name not in described}
    sections = (("Parameters", described), ("Attributes", attributes), ("Raises", entry.doc.raises))
    for title, items in sections:
        if items:
            lines += [f"**{title}**", "", *_definitions(items), ""]
        if title == "Attributes" and entry.doc.returns:
            lines += ["**Returns**", "", entry.doc.returns, ""]
    return lines


def _definitions(items: dict[str, str]) -> list[str]:
    lines = []
    for name, text in items.items():
        first, *rest = text.splitlines() or [""]
        lines += [f"- `{name}`: {first}", *(f"    {line}" if line else "" for line in rest)]
    return lines


def _call(name: str, entry: Member) -> str:
    """The signature, on several lines if it is long."""
    parts, keyword_only = [], False
    parameters = _signature(entry.thing)
    for key, (annotation, default, _) in entry.parameters.items():
        kind = parameters[key].kind
        star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(kind, "")
        if kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            if not any(part.startswith("*") for part in parts):
                parts.append("*")
            keyword_only = True
        typed = f"{star}{key}: {annotation}" if annotation else f"{star}{key}"
        shown = "" if default is inspect.Parameter.empty else f" = {default_text(default)}"
        parts.append(typed + shown)
    line = f"{name}({', '.join(parts)}){_result(entry.thing)}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){_result(entry.thing)}"])


def default_text(value: Any) -> str:
    """A default as it is written in a signature."""
    text = "..." if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else repr(value)
    return value.__name__ if callable(value) and hasattr(value, "__name__") else re.sub(r" at 0x\w+", "", text)


def _result(thing: Any) -> str:
    if inspect.isclass(thing):
        return ""
    found = inspect.signature(thing).return_annotation
    if found is inspect.Signature.empty:
        return ""
    return f" -> {found if isinstance(found, str) else inspect.formatannotation(found)}"


@cache
def undocumented() -> tuple[str, ...]:
    """`name(parameter)` for every parameter of the API that nothing describes, and `name` for what has no docstring."""
    missing = []
    for entry in members():
        if not entry.doc.prose:
            missing.append(entry.name)
        if not (inspect.isclass(entry.thing) and issubclass(entry.thing, Exception)):
            missing += [f"{entry.name}({name})" for name, (_, _, text) in entry.parameters.items() if not text]
    return tuple(missing)
