"""Write a program that reproduces a failed call with numpy and ONNX Runtime only, like ATen's `repro_from_args`."""

from __future__ import annotations

import base64
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.base.version import __version__

_PROGRAM = '''\
# {title}
# onnx_convgrad {version}, onnxruntime {runtime}, numpy {numpy}
import base64
import zlib

import numpy as np
import onnxruntime

model = zlib.decompress(base64.b64decode("""
{model}
"""))
session = onnxruntime.InferenceSession(model, providers={providers!r})
rng = np.random.default_rng(0)
feeds = {{
{feeds}
}}
for output, value in zip(session.get_outputs(), session.run(None, feeds)):
    print(output.name, value.dtype, value.shape)
'''


def reproduction(
    title: str, model: bytes, feeds: Mapping[str, tuple[Sequence[int], np.dtype]], providers: Sequence[Any]
) -> str:
    """Return the text of the program, which draws random operands.

    Args:
        title: A description of the call, in one line.
        model: The serialized model, which the program contains.
        feeds: Shape and dtype of each operand.
        providers: As `onnxruntime.InferenceSession` takes them.
    """
    import onnxruntime

    made = "    {!r}: rng.standard_normal({}).astype({!r}),"
    lines = [made.format(name, tuple(shape), dtype.name) for name, (shape, dtype) in feeds.items()]
    return _PROGRAM.format(
        title=title,
        version=__version__,
        runtime=onnxruntime.__version__,
        numpy=np.__version__,
        model="\n".join(textwrap.wrap(base64.b64encode(zlib.compress(model, 9)).decode(), 110)),
        providers=list(providers),
        feeds="\n".join(lines),
    )
