"""The command `view`: write a page that shows a model beside its gradient graph (tool: may change in a minor version)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from onnx_convgrad.cli.command import Model, command
from onnx_convgrad.cli.shared_options import out_option
from onnx_convgrad.cli.tables import Output, bytes_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.options import Loading, Options

if TYPE_CHECKING:
    from onnx_convgrad.pipeline.built import Built


@command()
def view(
    model: Model,
    output: Annotated[Path | None, out_option("the page. [default: <stem>.view.html beside the model]")] = None,
    *,
    options: Options,
    loading: Loading,
    out: Output,
) -> None:
    """Draw a model beside its gradient graph, as one HTML file.

    The page needs no network. It shows which gradient nodes belong to a node, why each lowering was chosen, and memory.

    \b
    Example:
      onnx-convgrad view model.onnx
      onnx-convgrad view model.onnx --wrt inputs --input-shape image:8,3,224,224
    """
    path = page_path(model, output)
    with out.stages():
        built = write_page(model, loading, options, path)
    forward, gradients = len(built.primal.graph), len(built.model.graph)
    out.print_json({"output": str(path), "forward": forward, "with_gradients": gradients})
    out.line(f"{path}: {forward} nodes, {gradients} with gradients; {bytes_text(path.stat().st_size)}")


def page_path(model: Path, output: Path | None = None) -> Path:
    """The file to write, by default `<stem>.view.html` beside the model."""
    from onnx_convgrad.base.paths import unnamed
    from onnx_convgrad.frontend.files import check_folder

    path = output or unnamed(model.with_name(f"{model.stem}.view.html"), "-o")
    check_folder(path, "Choose another place with -o.")
    if path.exists() and model.exists() and path.samefile(model):
        raise ArgumentError(f"The output {str(path)!r} is the model itself.", hint="Choose another name with -o.")
    return path


def write_page(model: Path, loading: Loading, options: Options, path: Path) -> Built:
    """Transform a model, write the page, and return the transformed model, with all lowerings priced."""
    from onnx_convgrad.base.drafts import write_text
    from onnx_convgrad.base.progress import watched_steps
    from onnx_convgrad.cli.view_data import StepRecorder, page, view_data
    from onnx_convgrad.pipeline.stages import build

    recorder = StepRecorder()
    with watched_steps(recorder):
        built = build(loading.load(model), replace(options, compare=True))
    write_text(path, page(view_data(model.name, built, recorder)))
    return built
