"""Write the generated pages of the documentation: the API, commands, operators, the gallery, and the repository's files.

python docs/generate.py && zensical build --strict

The pages go into `docs/reference/`, `docs/project/` and `docs/gallery/`, which git ignores. An example of the gallery is
run, unless `.cache/gallery/` has its result: from an earlier call, or from the slow tests. A result is used until the
example, a file that it imports or the code of the package changes. Remove the folder to run all examples again.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generator import api, commands, gallery, operators, options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = ("reference", "project", "gallery")
"""Folders below `docs/` that hold nothing but generated pages."""

PROJECT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
           "CODE_OF_CONDUCT.md": "code_of_conduct.md"}  # fmt: skip
"""Files of the repository that are pages of the site, too."""

MOVED = {
    "project/contributing.md": {
        "project/model_flow.md": ("How a model flows", "How a model flows"),
        "project/how_to_add.md": ("How to add an operator, a pass, a loss ...", "How to add .*"),
    },
    "project/changelog.md": {"project/earlier_changes.md": ("Earlier changes", r"\[(0\.|1\.0\.0rc).*")},
}
"""Page of such a file -> pages for some of its sections: their title, and a pattern of the headings."""

_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def reference() -> dict[str, str]:
    """Generated page, relative to `docs/` -> its Markdown, without the gallery."""
    parts = (api, commands, options, operators)
    pages = {f"reference/{path}": text for part in parts for path, text in part.pages().items()}
    for source, page in PROJECT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        pages |= _divided(f"project/{page}", _LINK.sub(lambda link: _moved(link[1]), text))
    pages["reference/glossary.md"] = _glossary((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    pages["reference/index.md"] = _index(pages)
    return pages


def _divided(page: str, text: str) -> dict[str, str]:
    """A page and those that some of its sections move to; it begins with links to them."""
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    divided = {page: first}
    for path, (title, _) in MOVED.get(page, {}).items():
        divided[page] += f"- [{title}]({Path(path).name})\n"
        divided[path] = f"# {title}\n\n"
    for section in sections:
        heading = section.partition("\n")[0].removeprefix("## ")
        fits = (path for path, (_, pattern) in MOVED.get(page, {}).items() if re.fullmatch(pattern, heading))
        divided[next(fits, page)] += f"\n{section}"
    return divided


def _moved(link: str) -> str:
    """A link of a file at the top of the repository, as seen from `docs/project/`."""
    if "://" in link:
        return link
    if link in PROJECT:
        return PROJECT[link]
    return link.replace("docs/", "../", 1) if link.startswith("docs/") else f"../../{link}"


def _glossary(guide: str) -> str:
    """The glossary of the contributors' guide as a page of its own."""
    section = guide.split("\n## Glossary\n")[1].split("\n## ", maxsplit=1)[0]
    return f"# Glossary\n\nTerms of the documentation, the messages and the code.\n{section}"


def _index(pages: dict[str, str]) -> str:
    """The list of all pages of the reference, by kind; the commands have a list of their own."""
    groups: dict[str, list[str]] = {"Functions and classes": [], "Modules": [], "Commands, operators, terms": []}
    for page, text in pages.items():
        path = page.removeprefix("reference/")
        if path == page or "/" in path:
            continue
        title = text.partition("\n")[0].removeprefix("# ")
        kinds = ("Modules", title.startswith("onnx_convgrad.")), ("Functions and classes", path == f"{title}.md")
        group = next((kind for kind, fits in kinds if fits), "Commands, operators, terms")
        groups[group].append(f"| [{title}]({path}) | {_first_sentence(text)} |")
    lines = ["# Reference", "", "Generated from the docstrings, the help texts and the table of rules.", ""]
    for heading, rows in groups.items():
        lines += [f"## {heading}", "", "| page | contents |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    """The first sentence of a page below its title and its signature."""
    prose = re.sub(r"^```.*?^```$", "", text.partition("\n")[2], flags=re.MULTILINE | re.DOTALL).strip()
    sentence = re.split(r"(?<=\.)\s", prose.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]
    return sentence.replace("|", "\\|")


def write(pages: dict[str, str]) -> None:
    """Write pages below `docs/`."""
    for path, text in pages.items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")


def write_all() -> None:
    """Replace the generated folders."""
    for folder in GENERATED:
        shutil.rmtree(DOCS / folder, ignore_errors=True)
    write(reference())
    gallery.write(DOCS / "gallery")


def write_one(asked: str) -> str:
    """Write one page, and run no example but its own.

    Args:
        asked: The page, as a path below `docs/` or by its name alone.

    Returns:
        The page as a path below `docs/`.

    Raises:
        SystemExit: No page, or several, are meant.
    """
    examples = {f"gallery/{name}.md": name for name in gallery.names()}
    pages = {} if _matching(asked, examples) else reference()
    page = _meant(asked, [*pages, *examples, "gallery/index.md"])
    if page in pages:
        write({page: pages[page]})
    else:
        gallery.write(DOCS / "gallery", only=examples.get(page))
    return page


def _meant(asked: str, pages: list[str]) -> str:
    """The only page that a path or the end of one means."""
    found = _matching(asked, pages)
    if len(found) == 1:
        return found[0]
    near = found or difflib.get_close_matches(asked, pages, n=5, cutoff=0.5) or pages
    raise SystemExit(f"{asked!r} is not a generated page. Did you mean one of these? {', '.join(near)}")


def _matching(asked: str, pages: Iterable[str]) -> list[str]:
    """The pages with this path, or else with this name."""
    wanted = f"{asked.removeprefix('docs/').removesuffix('.md')}.md"
    return [page for page in pages if page == wanted] or [page for page in pages if page.endswith(f"/{wanted}")]


if __name__ == "__main__":
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "page", nargs="?", metavar="PAGE", help="write this page alone, such as gallery/train_digits.md"
    )
    page = parser.parse_args().page
    if page is None:
        write_all()
    else:
        print(f"docs/{write_one(page)}")
