"""The command `web`: what it writes, what it serves, and what it refuses; the pages themselves run in `tests/browser`."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest

import onnx_convgrad as og
from onnx_convgrad.cli.web import _CDN, _RUNTIME_FILES, ISOLATION, WEB_VERSION, site_server, write_site
from tests.support.command_line import invoke
from tests.support.node import VERSIONS


@pytest.fixture(scope="module")
def program(digits_cnn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "program"
    og.build_training(str(digits_cnn), loss="cross_entropy", optimizer="adam", wrt="fc.*", target="web").save(folder)
    return folder


def runtime(folder: Path) -> Path:
    """A folder with empty files in place of the runtime's."""
    folder.mkdir()
    for name in _RUNTIME_FILES:
        (folder / name).touch()
    return folder


def test_the_site_holds_the_page_and_the_program(program: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert f"python -m http.server -d {site} 8000" in invoke("web", program, "--out", site).output
    found = {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}
    assert {
        "index.html",
        "page.js",
        "client.js",
        "worker.js",
        "trainer.js",
        "style.css",
        "config.js",
        "_headers",
    } < found
    assert {"program/initial.onnx", "program/step.onnx", "program/manifest.json"} < found
    assert f'RUNTIME = "{_CDN}"' in (site / "config.js").read_text()
    assert VERSIONS["onnxruntime-web"] == WEB_VERSION
    headers = (site / "_headers").read_text()
    assert all(f"{name}: {value}" in headers for name, value in ISOLATION.items())
    report = json.loads(invoke("web", program, "--out", site, "--json").output)  # over itself
    assert report["files"]["trainer.js"] == (site / "trainer.js").stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["site"]


def test_a_runtime_and_a_page_of_ones_own(program: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("mine")
    (page / "make.py").touch()
    write_site(program, tmp_path / "site", runtime=str(runtime(tmp_path / "dist")), page=page)
    assert (tmp_path / "site" / "index.html").read_text() == "mine"
    assert {p.name for p in (tmp_path / "site" / "runtime").iterdir()} == set(_RUNTIME_FILES)
    assert not (tmp_path / "site" / "page.js").exists()
    assert not (tmp_path / "site" / "make.py").exists()
    assert 'RUNTIME = "runtime/"' in (tmp_path / "site" / "config.js").read_text()


def test_the_server_sends_the_headers_of_threads(program: Path, tmp_path: Path) -> None:
    write_site(program, tmp_path / "site", runtime="https://example.org/dist")
    assert 'RUNTIME = "https://example.org/dist/"' in (tmp_path / "site" / "config.js").read_text()
    server = site_server(tmp_path / "site")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/worker.js") as answer:
            assert answer.headers["Content-Type"] == "text/javascript"
            assert {name: answer.headers[name] for name in ISOLATION} == ISOLATION
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_is_refused(program: Path, digits_cnn: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").touch()
    (tmp_path / "empty").mkdir()
    refused = {
        "exists and is not a site": [program, "--out", tmp_path / "other"],
        "is not a training program": [tmp_path / "empty", "--out", tmp_path / "site"],
        f"npm install onnxruntime-web@{WEB_VERSION}": [program, "--out", tmp_path / "site", "--runtime", tmp_path],
        "has no index.html": [program, "--out", tmp_path / "site", "--page", tmp_path],
    }
    for message, arguments in refused.items():
        assert message in " ".join(invoke("web", *arguments, status=2).output.split())
    assert not (tmp_path / "site").exists()
    for_cpu = og.build_training(str(digits_cnn), loss="cross_entropy", optimizer="sgd", wrt="fc.*")
    for_cpu.save(tmp_path / "cpu")
    text = invoke("web", tmp_path / "cpu", "--out", tmp_path / "site").output
    assert "Warning: The program was built for the target 'cpu'" in text
