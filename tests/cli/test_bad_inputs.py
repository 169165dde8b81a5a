"""Bad command lines and files end in one paragraph that says what is wrong and what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from onnx_convgrad.cli.app import main
from tests.cli.bad_inputs import BAD, furnish


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    furnish(path)
    return path


def test_there_are_many() -> None:
    assert len(BAD) > 100


@pytest.mark.slow
@pytest.mark.parametrize("line", BAD)
def test_one_paragraph_says_what_is_wrong(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    written = capfd.readouterr()
    assert ended.value.code == 2, written.err
    assert written.out == ""
    told, _, message = written.err.rpartition("Error: ")
    assert message.rstrip()[-1] in ".`?)" and "\n\n" not in message.strip()
    assert len(message) < 900
    for word in BAD[line]:
        assert word in message, message
    for odd in ("Traceback", "Please report", "failed unexpectedly", "Error:"):
        assert odd not in message and odd not in told
    assert sorted(folder.rglob("*")) == before  # nothing is left behind
