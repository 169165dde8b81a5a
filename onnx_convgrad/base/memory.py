"""The memory of this machine, to refuse arrays that cannot fit before they are made."""

from __future__ import annotations

import os

__all__ = ["machine_bytes"]


def machine_bytes() -> float:
    """Bytes of the machine's memory; infinity if the system does not report it (Windows)."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
