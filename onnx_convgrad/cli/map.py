"""The command `map`: gradients of each sample of a large data set, in files (tool: may change in a minor version)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.command import Model, command, own_option
from onnx_convgrad.cli.shared_options import DataOptions, data_option, out_option, preprocessing_of
from onnx_convgrad.cli.tables import Output
from onnx_convgrad.pipeline import option_text as text


@command(leave=("labels", "of", "task"))
def map_gradients(
    model: Model,
    *,
    data: Annotated[list[str], data_option()],
    output_folder: Annotated[Path, out_option("a folder of files with gradients.")],
    wrt: Annotated[
        list[str] | None, own_option("NAMES", "[default: inputs]", of="evaluation.mapper:gradient_model(wrt)")
    ] = None,
    of: Annotated[list[str] | None, own_option("NAMES", of="evaluation.mapper:gradient_model(of)")] = None,
    largest: Annotated[bool, own_option("--largest", of="evaluation.mapper:gradient_model(largest)")] = False,
    norms: Annotated[bool, own_option("--norms", of="evaluation.mapper:Mapper(norms)")] = False,
    outputs: Annotated[bool, own_option("--outputs", of="evaluation.mapper:Mapper(outputs)")] = False,
    samples_per_file: Annotated[
        int,
        own_option("INT", "[default: 1024]", of="evaluation.map_folder:map_folder(samples_per_file)"),
    ] = 1024,
    workers: Annotated[int, own_option("INT", of="evaluation.map_folder:map_folder(workers)")] = 1,
    options: DataOptions,
    out: Output,
) -> None:
    """Write gradients of each sample of a large data set.

    Each file is written once and whole: the same command goes on after an interruption.

    \b
    Example:
      onnx-convgrad map model.onnx --data images -o saliency --largest
      onnx-convgrad map model.onnx --data train.npz --wrt parameters --norms -o norms --workers 4
    """
    from onnx_convgrad.evaluation.map_folder import map_folder
    from onnx_convgrad.evaluation.predictor import open_model
    from onnx_convgrad.lowering.cost.calibration import cores

    with out.stages():
        mapped = map_folder(
            model,
            data,
            output_folder,
            wrt=text.whole(wrt) if wrt else "inputs",
            of=text.names(of) if of else None,
            largest=largest,
            samples_per_file=samples_per_file,
            workers=workers,
            progress=lambda done, count: announce(f"{done} of {count} files"),
            norms=norms,
            outputs=outputs,
            preprocessing=preprocessing_of(open_model(model).manifest, options),
            batch_size=options.batch_size,
            providers=list(options.providers or ()) or None,
            options={"threads": options.threads or max(cores() // max(workers, 1), 1)},
        )
    kept = len(mapped.files) - mapped.written
    out.print_json({"samples": mapped.samples, "files": list(map(str, mapped.files)), "written": mapped.written})
    of_them = f", {kept} of them kept" if kept else ""
    out.line(f"{mapped.samples:,} samples in {len(mapped.files)} files{of_them}: {output_folder}")
