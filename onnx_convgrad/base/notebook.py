"""The look of objects in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


class Shown:
    """Base of objects that a notebook shows as the text that `print` shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def table_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a column for each key; lists are left out, numbers have four digits."""
    plain = [{k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in rows]
    columns = list(dict.fromkeys(key for row in plain for key in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{_cell(row.get(name, ''))}</td>" for name in columns) for row in plain)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
