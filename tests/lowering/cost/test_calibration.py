"""The store of measured speeds, and measuring them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

import onnx_convgrad as og
from onnx_convgrad.base.progress import listening
from onnx_convgrad.bench.calibrate import calibrate
from onnx_convgrad.ir.targets import TARGETS, Rates
from onnx_convgrad.lowering.cost import calibration
from onnx_convgrad.lowering.cost.calibration import Store, calibrated, shipped, source
from tests.support.conv_geometry import case, conv_model

FAST = Rates(gemm=1e15, small=1, cached=1e6, memory=1e6, cache=1e6, node=1e-9, item=1e-3, run=1e-3, tap=1e-3)


def test_written_speeds_are_read_back_for_this_machine_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "new folder")
    store.write(calibration.key("cpu"), FAST)
    assert calibrated(TARGETS["cpu"], store).rates == FAST
    assert source(TARGETS["cpu"], store) == "measured"
    assert calibrated(TARGETS["cuda"], store) == TARGETS["cuda"]
    assert calibrated(TARGETS["web"], store) == TARGETS["web"]
    other = Store(tmp_path / "other")
    other.write(calibration.key("cpu", threads=calibration.cores() + 1), FAST)
    assert calibrated(TARGETS["cpu"], other) == shipped(TARGETS["cpu"])


def test_a_second_machine_keeps_the_first_ones_entry(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("one", FAST)
    store.write("two", replace(FAST, gemm=2e15))
    assert {name: entry["gemm"] for name, entry in store.read().items()} == {"one": 1e15, "two": 2e15}
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"a": 3}'])
def test_a_damaged_store_counts_as_empty_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "rates.json").write_text(text)
    with pytest.warns(UserWarning, match="is not readable"):
        assert Store(tmp_path).read() == {}


def test_an_entry_of_another_version_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(calibration.key("cpu"), FAST)
    store.path.write_text(store.path.read_text().replace("small", "tiny"))  # type: ignore[union-attr]
    assert calibrated(TARGETS["cpu"], store) == shipped(TARGETS["cpu"])


def test_a_known_processor_has_shipped_speeds_unless_the_store_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zen5 = {"vendor_id": "AuthenticAMD", "cpu family": "26"}
    cpu = TARGETS["cpu"]
    assert shipped(cpu, zen5).rates.gemm > 2 * cpu.rates.gemm
    assert replace(shipped(cpu, zen5), rates=cpu.rates) == cpu
    assert shipped(TARGETS["web"], zen5) == TARGETS["web"]
    assert shipped(cpu, {"vendor_id": "GenuineIntel", "cpu family": "6"}) == cpu
    assert shipped(cpu, {}) == cpu
    assert calibrated(cpu, Store(tmp_path)) == shipped(cpu)
    assert calibrated(cpu, Store("")) == cpu
    assert source(cpu, Store("")) == "default"
    monkeypatch.setattr(calibration, "_cpuinfo", lambda: zen5)
    assert source(cpu, Store(tmp_path)) == "shipped"


def test_a_gpu_is_known_by_its_model(tmp_path: Path) -> None:
    assert calibration.accelerator(tmp_path) == "GPU"
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   16\n")
    calibration.accelerator.cache_clear()
    assert calibration.accelerator(tmp_path) == "NVIDIA H200"
    assert calibration.key("cuda").startswith("onnxruntime ")


def test_an_empty_variable_turns_the_store_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Store().path is None
    with pytest.raises(OSError, match="turned off"):
        Store().write("x", FAST)
    monkeypatch.setenv("ONNX_CONVGRAD_CACHE", str(tmp_path))
    assert Store().path == tmp_path / "rates.json"


def test_the_measured_speeds_decide_the_lowering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNX_CONVGRAD_CACHE", str(tmp_path))
    model = conv_model(case((8, 16, 28, 28), 16, (3, 3), begin=1))

    def predicted() -> dict[str, float]:
        row = next(r for r in og.explain(model, wrt=["w"]).rows if r["operator"] == "ConvWeightGrad")
        return {c["name"]: c["seconds"] for c in row["candidates"] if c["seconds"] is not None}

    before = predicted()
    Store().write(calibration.key("cpu"), FAST)
    after = predicted()
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)


@pytest.mark.slow
def test_calibration_measures_every_rate() -> None:
    stages: list[str] = []
    with listening(stages.append):
        found = asdict(calibrate(1, repeats=1))
    assert set(found) == set(asdict(Rates()))
    assert found.pop("wave") == 0  # the CPU multiplies patches
    assert min(found.values()) > 0
    assert found["cached"] >= found["memory"]
    assert len(set(stages)) >= 6
