"""Find the files of external weights, and refuse those outside the folder of the model.

A model names the files of its external weights. These names are not trusted: a weight must be in a regular file inside the
folder of the model. A link is followed if it leads into that folder, or, where the model file is a link itself, into the
folder of the file that this leads to: the layout of content-addressed caches such as that of huggingface_hub.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.serialize import GONE, REMEDY


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a model, and the folder that links may also lead to."""

    path: Path
    linked: Path | None = None

    @classmethod
    def of_file(cls, model: Path) -> Folder:
        """The folder of a model file."""
        return cls(model.parent, Path(os.path.realpath(model)).parent if model.is_symlink() else None)

    def holds(self, file: Path) -> bool:
        """Whether `file`, with all links resolved, is inside."""
        roots = [Path(os.path.realpath(self.path)), *([self.linked] if self.linked else [])]
        return any(file.is_relative_to(root) for root in roots)


class _Located(ir.ExternalTensor):
    """A tensor in a checked file, which may be gone when it is read."""

    def _load(self) -> None:
        try:
            super()._load()  # type: ignore[no-untyped-call]
        except (OSError, ValueError) as problem:
            gone = GONE if isinstance(problem, FileNotFoundError) else f"which cannot be read: {problem}"
            raise ModelError(
                f"The weight {self.name!r} was in the file {self.path!r}, {gone}.", hint=REMEDY
            ) from problem


class _HardLinked(_Located):
    """A tensor in a checked file with several hard links, as caches make them; `onnx_ir` refuses to read such files."""

    def _check_path_containment(self) -> None:
        """Accept the file: `located` has checked it."""


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
    names = [PurePosixPath(location), PureWindowsPath(location)]
    if not location or "\0" in location or any(name.anchor or ".." in name.parts for name in names):
        raise ModelError(f"{subject} names the file {location!r}, which is not inside the model's folder.")
    try:
        real = Path(os.path.realpath(path, strict=True))
        found = real.stat()
    except FileNotFoundError:
        raise ModelError(f"{what}, which is not there.", hint="Put it back: the model needs both files.") from None
    except (OSError, ValueError) as problem:
        raise ModelError(f"{what}, which cannot be read: {problem}.") from None
    if not folder.holds(real):
        raise ModelError(f"{what}, a link to {str(real)!r} outside the model's folder.", hint="Copy the file there.")
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{what}, which is not a regular file.")
    offset, length = tensor.offset or 0, tensor.length or 0
    if offset < 0 or length < 0 or (0 < length < tensor.nbytes):
        raise ModelError(f"{subject} takes {tensor.nbytes} bytes, not {length} from byte {offset} on.")
    end = offset + max(length, tensor.nbytes)
    if end > found.st_size:
        raise ModelError(
            f"{what} up to byte {end}, but that has {found.st_size} bytes.",
            hint="It may be cut off, or belong to another model.",
        )
    kind = _HardLinked if found.st_nlink > 1 else _Located
    inside = kind is _Located and real.is_relative_to(os.path.realpath(folder.path))
    return kind(
        location if inside else real.name,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        base_dir=folder.path.absolute() if inside else real.parent,  # the caller may change the working directory
    )
