"""The command `web`: write a static site that trains a program in the browser (tool: may change in a minor version)."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.shared_options import out_option
from onnx_convgrad.cli.tables import Output, Table, bytes_text
from onnx_convgrad.errors import ArgumentError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

WEB_VERSION = "1.30.0"
"""The version of onnxruntime-web that the site loads."""

_CDN = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{WEB_VERSION}/dist/"
_RUNTIME_FILES = (
    "ort.wasm.min.mjs",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
_STATIC = Path(__file__).parent / "site"
_PAGE = ("index.html", "page.js")
_HEADERS = """\
# Threads of WebAssembly need a page that is cross-origin isolated, which these two headers make it. Hosts that read a file
# `_headers` (Netlify, Cloudflare Pages) send them; on others, set them in the configuration of the server.
/*
  Cross-Origin-Opener-Policy: same-origin
  Cross-Origin-Embedder-Policy: require-corp
"""
ISOLATION = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@command()
def web(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="The folder of a training program.")],
    *,
    output: Annotated[
        Path, out_option("the folder of the site; one that is there is replaced. [default: site]")
    ] = Path("site"),
    runtime: Annotated[
        str,
        own_option(
            "URL|FOLDER",
            f"The folder dist of onnxruntime-web {WEB_VERSION}; one of yours is copied. [default: jsDelivr]",
        ),
    ] = _CDN,
    page: Annotated[
        Path | None, own_option("FOLDER", "Files of a page of your own, instead of the general one.")
    ] = None,
    port: Annotated[
        int | None, own_option("INT", "Then serve the site on this port of localhost.", min=0, max=65535)
    ] = None,
    out: Output,
) -> None:
    """Write a static site that trains a program in the browser.

    \b
    Example:
      onnx-convgrad web program -o site --port 8000
      onnx-convgrad web program --runtime node_modules/onnxruntime-web/dist
    """
    with out.stages("writing"):
        sizes = write_site(program, output, runtime=runtime, page=page)
    out.print_json({"site": str(output), "files": sizes})
    out.table(Table(["file", "size"], [[name, bytes_text(size)] for name, size in sizes.items()], {1}))
    served = f"python -m http.server -d {shlex.quote(str(output))} 8000"
    out.line(f"{output}: {bytes_text(sum(sizes.values()))}. Serve it with `{served}`.")
    if port is not None:
        with site_server(output, port) as server:
            out.line(f"Serving {output} at http://localhost:{server.server_address[1]}/ until Ctrl-C.")
            server.serve_forever()


def write_site(program: Path, output: Path, *, runtime: str = _CDN, page: Path | None = None) -> dict[str, int]:
    """Write the site; path of each file in it -> bytes."""
    from onnx_convgrad.base.drafts import draft_folder, recover_folder, replace_folder
    from onnx_convgrad.base.warn import warn
    from onnx_convgrad.frontend.files import check_folder
    from onnx_convgrad.programs.program import TrainingProgram

    loaded = TrainingProgram.load(program)
    recover_folder(output)
    if output.exists() and not (output / "config.js").exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"{str(output)!r} exists and is not a site.", hint="Give another folder.")
    if page is not None and not (page / "index.html").is_file():
        raise ArgumentError(f"{str(page)!r} has no index.html.")
    remote = runtime.startswith(("http://", "https://"))
    lost = [] if remote else [name for name in _RUNTIME_FILES if not (Path(runtime) / name).is_file()]
    if lost:
        raise ArgumentError(
            f"{runtime!r} has no {lost[0]}.",
            hint=f"Run `npm install onnxruntime-web@{WEB_VERSION}` and give node_modules/onnxruntime-web/dist.",
        )
    target = loaded.manifest.options.get("target")
    if target not in ("web", "webgpu", "portable"):
        warn(
            f"The program was built for the target {target!r}: a browser may lack operators in it. Build it with"
            ' target="web".'
        )
    if not output.exists():
        check_folder(output)
    with draft_folder(output) as work:
        draft = work / "site"
        draft.mkdir()
        for file in sorted(_STATIC.iterdir()):
            if page is None or file.name not in _PAGE:
                shutil.copyfile(file, draft / file.name)
        if page is not None:
            left = shutil.ignore_patterns("*.py", "*.md", "__pycache__")
            shutil.copytree(page, draft, dirs_exist_ok=True, ignore=left)
        loaded.save(draft / "program", defaults=False)
        (draft / "_headers").write_text(_HEADERS, encoding="utf-8")
        names = {"PROGRAM": "program/", "RUNTIME": f"{runtime.removesuffix('/')}/" if remote else "runtime/"}
        lines = [f"export const {name} = {json.dumps(value)};\n" for name, value in names.items()]
        (draft / "config.js").write_text("// Written by the command `web`.\n" + "".join(lines), encoding="utf-8")
        if not remote:
            (draft / "runtime").mkdir()
            for name in _RUNTIME_FILES:
                shutil.copyfile(Path(runtime) / name, draft / "runtime" / name)
        sizes = {p.relative_to(draft).as_posix(): p.stat().st_size for p in sorted(draft.rglob("*")) if p.is_file()}
        replace_folder(draft, output)
    return sizes


def site_server(site: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of a site on localhost, with the headers that threads need; port 0 takes a free one."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {  # noqa: RUF012 - as in the base class
            **SimpleHTTPRequestHandler.extensions_map,
            ".js": "text/javascript",
            ".mjs": "text/javascript",
            ".wasm": "application/wasm",
        }

        def end_headers(self) -> None:
            for name, value in {**ISOLATION, "Cache-Control": "no-cache"}.items():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(site)))
