"""Show text that comes from files: names, labels, paths, messages of other libraries."""

from __future__ import annotations

import unicodedata


def shown(text: str) -> str:
    r"""The text on one line of a terminal, with escapes (`\x1b`, `\n`, `\u202e`) for all that is not to be read.

    Such are control characters, which command a terminal, line ends, which could forge a line of ours, marks that change the
    direction of the text around them, and characters that Unicode leaves private or unassigned.

    >>> print(shown("größe \x1b[2J\nError"))
    größe \x1b[2J\nError
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
