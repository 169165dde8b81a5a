"""Run the command line: `python -m onnx_convgrad`."""

from __future__ import annotations

from onnx_convgrad.cli.app import main

if __name__ == "__main__":
    main()
