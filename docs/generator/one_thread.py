"""Run a program with one thread in each library: `python one_thread.py PROGRAM`.

The networks of the examples gain nothing from threads, and threads that wait for each other keep a processor busy: where
other programs need it, an example takes up to ten times as long.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def limit_threads() -> None:
    """Give each library one thread; it must not be loaded yet."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):  # ONNX Runtime reads none of these variables
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    onnxruntime.SessionOptions = OneThread


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    limit_threads()
    runpy.run_path(sys.argv[0], run_name="__main__")
