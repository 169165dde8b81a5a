"""The writer of nodes: what it knows of their results."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import onnx_ir as ir
from onnx_convgrad.ir.emit import Emitter

x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 4, 6]))
e = Emitter(ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g"))
print(e.op("Reshape", x, e.ints([-1, 24])).dtype)
"""


def test_the_first_node_of_a_process_has_a_dtype() -> None:
    """The table of shape inference is filled before it is asked."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "FLOAT\n"
