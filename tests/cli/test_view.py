"""The page of `view`: its content, and what a browser makes of it where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs
import pytest

from onnx_convgrad.base.progress import watched_steps
from onnx_convgrad.cli.view_data import StepRecorder, page, view_data
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from tests.support.command_line import invoke

PACKAGES = ("puppeteer-core@24.43.1", "@sparticuz/chromium@147.0.0")
"""Chromium without a screen, and what steers it."""

MODEL = """<ir_version: 10, opset_import: ["": 21]>
net (float[2,3,8,8] x, float[4,3,3,3] w) => (float[2,4] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    r = Relu (c)
    y = ReduceMax <keepdims = 0> (r, axes)
}"""


@pytest.fixture
def model() -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(MODEL)
    parsed.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3]), "axes"))
    for node in parsed.graph.node:
        node.name = f"</script><b>{node.op_type}"  # names come from strangers
    return parsed


@pytest.fixture
def data(model: onnx.ModelProto) -> dict[str, Any]:
    recorder = StepRecorder()
    with watched_steps(recorder):
        built = build(model, Options(wrt=("x", "w"), compare=True))
    return view_data("net.onnx", built, recorder)


def test_every_gradient_node_is_beside_its_forward_node(data: dict[str, Any]) -> None:
    forward = [node["op"] for node in data["graphs"]["forward"]]
    assert forward == ["Conv", "Relu", "ReduceMax"]
    for kind in ("abstract", "lowered"):
        owners = {forward[node["forward"]] for node in data["graphs"][kind] if node["forward"] >= 0}
        assert owners == set(forward), kind
    abstract = {node["op"]: forward[node["forward"]] for node in data["graphs"]["abstract"]}
    assert abstract["ConvInputGrad"] == abstract["ConvWeightGrad"] == "Conv"
    assert "ConvWeightGrad" not in {node["op"] for node in data["graphs"]["lowered"]}


def test_the_values_that_nodes_read_are_described(data: dict[str, Any]) -> None:
    read = {v for nodes in data["graphs"].values() for node in nodes for v in node["inputs"] + node["outputs"] if v}
    assert read <= data["values"].keys()
    assert data["values"]["x"] == ["float", "2x3x8x8", "input"]
    assert data["values"]["axes"][2] == "stored"


def test_choices_and_stages(data: dict[str, Any]) -> None:
    assert {choice["operator"] for choice in data["choices"]} == {"ConvInputGrad", "ConvWeightGrad"}
    for choice in data["choices"]:
        assert choice["chosen"] in {
            name for _, seconds, _, reason, name in choice["candidates"] if seconds and not reason
        }
    assert [stage["name"] for stage in data["stages"]] == ["as read", "canonical", "differentiated", "lowered"]
    assert data["gradients"] == {"x": "x_grad", "w": "w_grad"}
    assert len(data["memory"]) == len(data["order"]) == data["stages"][-1]["nodes"]


def test_the_steps_say_what_they_changed(model: onnx.ModelProto) -> None:
    recorder = StepRecorder()
    with watched_steps(recorder):
        built = build(model, Options(wrt=("x", "w")))
    steps = {step["name"]: step for step in recorder.steps}
    assert steps["differentiate"]["before"] == 3
    assert dict(steps["differentiate"]["added"])["ConvWeightGrad"] == 1
    assert dict(steps["lower"]["removed"])["ConvWeightGrad"] == 1
    assert recorder.steps[-1]["after"] == len(built.model.graph)
    for earlier, later in pairwise(recorder.steps):
        assert earlier["after"] == later["before"]
    assert all(step["does"] for step in recorder.steps)


def test_steps_are_recorded_inside_the_context_only(model: onnx.ModelProto) -> None:
    recorder = StepRecorder()
    with watched_steps(recorder):
        pass
    build(model, Options(wrt=("x",)))
    assert recorder.steps == []


def test_the_page_is_one_file_and_names_cannot_break_it(data: dict[str, Any]) -> None:
    text = page(data)
    inside = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1]) == json.loads(json.dumps(data))
    assert text.count("</script>") == 2
    assert "<b>" not in text
    assert not re.search(r'(src|href)="|url\(|fetch\(|import\(|@import', text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_the_command(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    done = invoke("view", path, "--wrt", "x,w")
    assert "3 nodes" in done.stdout
    assert (tmp_path / "net.view.html").stat().st_size > 10_000
    described = json.loads(invoke("view", path, "--wrt", "w", "-o", tmp_path / "page.html", "--json").stdout)
    assert described["forward"] == 3
    assert Path(described["output"]).exists()


def test_explain_writes_the_same_page(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    invoke("explain", path, "--wrt", "x,w", "--html", tmp_path / "explain.html")
    invoke("view", path, "--wrt", "x,w", "-o", tmp_path / "view.html")
    assert (tmp_path / "explain.html").read_text() == (tmp_path / "view.html").read_text()


def test_refused_places(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    for place in (path, tmp_path, tmp_path / "missing" / "page.html"):
        assert "Error: " in invoke("view", path, "-o", place, status=2).stderr
    assert onnx.load(path).graph.name == "net"


@pytest.fixture(scope="module")
def modules() -> Path:
    """A `node_modules` folder with Chromium, from a cache that npm fills; skips the test if it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Node.js is not installed.")
    cached = Path(platformdirs.user_cache_dir("onnx_convgrad")) / "-".join(PACKAGES).replace("/", "+")
    if not (cached / "complete").exists():
        cached.mkdir(parents=True, exist_ok=True)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cached), *PACKAGES]
        try:
            subprocess.run([npm, "install", *options], capture_output=True, check=True, timeout=300)
        except (subprocess.SubprocessError, OSError) as problem:
            pytest.skip(f"npm could not install Chromium: {problem}")
        (cached / "complete").touch()
    return cached / "node_modules"


BROWSE = """
const [address, width, height, actions] = process.argv.slice(2);
const chromium = (await import("@sparticuz/chromium")).default;
const { launch } = await import("puppeteer-core");
const browser = await launch({ args: chromium.args, executablePath: await chromium.executablePath(), headless: "shell",
  defaultViewport: { width: +width, height: +height } });
const tab = await browser.newPage(), problems = [];
tab.on("pageerror", (problem) => problems.push(problem.message));
tab.on("request", (request) => { if (request.url() !== address) problems.push(request.url()); });
await tab.goto(address);
const results = [];
for (const action of JSON.parse(actions)) results.push(await tab.evaluate(action));
console.log(JSON.stringify({ problems, results }));
await browser.close();
"""


def _browse(modules: Path, path: Path, width: int, height: int, *actions: str) -> list[Any]:
    """Open a page, evaluate expressions one after the other, and return their values."""
    program = modules.parent / "browse.mjs"
    program.write_text(BROWSE, encoding="utf-8")
    command = ["node", str(program), path.as_uri(), str(width), str(height), json.dumps(actions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []  # no error, and no request but that for the page
    return list(found["results"])


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_in_a_browser(data: dict[str, Any], modules: Path, tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "page.html").write_text(page(data), encoding="utf-8")
    panel = "document.getElementById('panel').textContent"
    marked = "document.querySelectorAll('.node.own').length"
    start, selected, own, lowered, abstract, found, wide = _browse(
        modules,
        tmp_path / "page.html",
        width,
        height,
        panel,
        f"document.querySelector('.node').click(); {panel}",
        marked,
        "[...document.querySelectorAll('.node')].map((node) => node.firstChild.textContent)",
        "at('stage').value = 'abstract'; at('stage').dispatchEvent(new Event('change'));"
        "[...document.querySelectorAll('.node')].map((node) => node.firstChild.textContent)",
        "at('search').value = 'relu'; search(0); at('count').textContent + selected.op",
        "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    )
    assert "differentiated" in start
    assert "ConvWeightGrad: " in selected
    assert "do not apply" in selected
    assert own >= 3
    assert "ConvWeightGrad" not in lowered
    assert "ConvWeightGrad" in abstract
    assert found.startswith("1 of ")
    assert found.endswith("Relu")
    assert wide <= 0, "the page is wider than the screen"


@pytest.mark.slow
def test_a_large_graph_in_a_browser(data: dict[str, Any], modules: Path, tmp_path: Path) -> None:
    copies = 900
    large = dict(data, graphs={kind: [] for kind in data["graphs"]}, order=[], memory=[], values={}, choices=[])
    for i in range(copies):
        for kind, nodes in data["graphs"].items():
            for node in nodes:
                names = {key: [f"{name}#{i}" for name in node[key]] for key in ("inputs", "outputs")}
                shift = {
                    "name": f"{node['name']}#{i}",
                    "forward": node["forward"] + 3 * i if node["forward"] >= 0 else -1,
                }
                large["graphs"][kind].append({**node, **names, **shift})
        large["order"] += [f"{name}#{i}" for name in data["order"]]
        large["memory"] += data["memory"]
    assert len(large["order"]) > 5000
    (tmp_path / "page.html").write_text(page(large), encoding="utf-8")
    drawn, moved, milliseconds = _browse(
        modules,
        tmp_path / "page.html",
        1280,
        800,
        "document.querySelectorAll('.node').length",
        f"at('search').value = '#{copies - 1}'; search(0); selected.name",
        "((start) => { for (let i = 0; i < 20; i += 1) { at('scroll').scrollTop = i * height / 20; draw(); }"
        " return (performance.now() - start) / 20; })(performance.now())",
    )
    assert drawn < 500  # what is in sight, not all
    assert moved.endswith(f"#{copies - 1}")
    assert milliseconds < 250
