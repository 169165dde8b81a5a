"""Find the files of external weights, and refuse those outside the folder of the model.

A model names the files of its external weights. These names are not trusted: a weight must be in a regular file inside the
folder of the model. A link is followed if it leads into that folder, or, where the model file is a link itself, into the
folder of the file that this leads to: the layout of content-addressed caches such as that of huggingface_hub.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.base.paths import Folder, leads_out, place_of, without_waiting
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.serialize import GONE, REMEDY


class _Located(ir.ExternalTensor):
    """A tensor in a checked file, which is checked again when it is read: another one may have taken its name."""

    folder: Folder

    def _check_path_containment(self) -> None:
        """Leave it to `_open`: that checks the very file that is read, and accepts hard links, as caches make them."""

    def _load(self) -> None:
        what = f"The weight {self.name!r} was in the file {self.path!r}"
        with _open(Path(self.path), self.folder, what, self._end(), GONE, REMEDY) as file:
            self.raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.nbytes else None
        if self.raw is None or self.dtype.bitwidth < _BYTE:
            content = b"" if self.raw is None else self.raw[self.offset or 0 :][: self.nbytes]
            packed = onnx.TensorProto(dims=self.shape.numpy(), data_type=self.dtype.value, raw_data=content)
            self._array = ir.serde.deserialize_tensor(packed).numpy()
        else:
            dtype = np.dtype(self.dtype.numpy()).newbyteorder("<")
            self._array = np.frombuffer(self.raw, dtype, self.size, self.offset or 0).reshape(self.shape.numpy())

    def tofile(self, file: Any) -> None:  # what has a method `write`
        """Write the bytes of the tensor."""
        self.numpy()
        if self.raw is not None:
            start = self.offset or 0
            file.write(memoryview(self.raw)[start : start + (self.length or self.nbytes)])

    def _end(self) -> int:
        return (self.offset or 0) + max(self.length or 0, self.nbytes)


_BYTE = 8


def _open(path: Path, folder: Folder, what: str, end: int, gone: str, remedy: str) -> BinaryIO:
    """Open a file of weights, of at least `end` bytes.

    Raises:
        ModelError: It is outside the folder, missing, not a regular file or too short.
    """
    try:
        file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - `Path.open` takes no opener
        try:
            _check(file, path, folder, what, end)
        except BaseException:
            file.close()
            raise
    except FileNotFoundError:
        raise ModelError(f"{what}, {gone}.", hint=remedy) from None
    except IsADirectoryError:
        raise ModelError(f"{what}, which is not a regular file.") from None
    except (OSError, ValueError) as problem:
        raise ModelError(f"{what}, which cannot be read: {problem}.") from None
    return file


def _check(file: BinaryIO, path: Path, folder: Folder, what: str, end: int) -> None:
    found, real = os.fstat(file.fileno()), place_of(file, path)
    if not folder.holds(real):
        raise ModelError(f"{what}, a link to {str(real)!r} outside the model's folder.", hint="Copy the file there.")
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{what}, which is not a regular file.")
    if end > found.st_size:
        raise ModelError(
            f"{what} up to byte {end}, but that has {found.st_size} bytes.",
            hint="It may be cut off, or belong to another model.",
        )


def located(tensor: ir.ExternalTensor, folder: Folder | None, subject: str) -> ir.ExternalTensor:
    """Check the file of an external tensor, and return the tensor with the file that a link leads to.

    Args:
        tensor: The tensor.
        folder: The folder of the model; `None` if only the tensor itself can tell, as in an `onnx_ir.Model`.
        subject: Beginning of the sentence of an error.

    Raises:
        ModelError: The file is outside the folder, missing, not a regular file or too short; or there is no folder.
    """
    if folder is None and not tensor.base_dir:
        raise ModelError(
            f"{subject} is in the file {os.fspath(tensor.location)!r}, and the folder of that file is not known.",
            hint="Pass the path of the model file, or base_dir=, the folder of its weights.",
        )
    folder = folder or Folder(Path(tensor.base_dir))
    location = os.fspath(tensor.location)
    path = folder.path / location
    what = f"{subject} is in the file {str(path)!r}"
    if leads_out(location):
        raise ModelError(f"{subject} names the file {location!r}, which is not inside the model's folder.")
    offset, length = tensor.offset or 0, tensor.length or 0
    if offset < 0 or length < 0 or (0 < length < tensor.nbytes):
        raise ModelError(f"{subject} takes {tensor.nbytes} bytes, not {length} from byte {offset} on.")
    gone, remedy = "which is not there", "Put it back: the model needs both files."
    with _open(path, folder, what, offset + max(length, tensor.nbytes), gone, remedy) as f:
        linked, real = os.fstat(f.fileno()).st_nlink > 1, place_of(f, path)
    inside = not linked and real.is_relative_to(os.path.realpath(folder.path))
    found = _Located(
        location if inside else real.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        base_dir=folder.path.absolute() if inside else real.parent,  # the caller may change the working directory
    )
    found.folder = folder.absolute()
    return found
