"""What every command runs inside of: the package's errors as a paragraph on stderr and an exit status."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import typer

__all__ = ["guarded"]


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Turn the package's errors, and those of files, into a paragraph on stderr and an exit status."""
    from onnx_convgrad.cli.tables import recorded_warnings
    from onnx_convgrad.errors import ConvGradError

    for library in ("onnx_ir", "onnx_shape_inference"):  # they tell of what is then refused with a remedy
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        with recorded_warnings():
            yield
        sys.stdout.flush()
    except ConvGradError as problem:
        print(f"Error: {problem}", file=sys.stderr)
        raise typer.Exit(problem.exit_status) from None
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as problem:
        if problem.filename is None:  # printing failed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            print(f"Error: the output cannot be written: {problem.strerror or problem}.", file=sys.stderr)
            raise typer.Exit(2) from None
        print(f"Error: {os.fspath(problem.filename)!r} cannot be used: {problem.strerror}.", file=sys.stderr)
        raise typer.Exit(2) from None
