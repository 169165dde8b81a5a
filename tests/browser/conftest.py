"""Packages of npm for the driver of the browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import chromium
from tests.support.node import packages


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the driver needs."""
    folder = tmp_path_factory.mktemp("node") / "node_modules"
    (folder / "@sparticuz").mkdir(parents=True)
    (folder / "playwright-core").symlink_to(packages("playwright-core") / "playwright-core")
    if not chromium():
        name = "@sparticuz/chromium"
        (folder / name).symlink_to(packages(name) / name)
    return folder
