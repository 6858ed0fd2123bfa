"""Measuring a device."""

from pathlib import Path

import attrs
import pytest
import torch

from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.calibrate import (
    CalibrationSizes,
    choose_local_device,
    get_calibration_path,
    load_local_device_model,
    measure_and_save_calibration,
)
from drawloom.graph import UserError

CPU = torch.device("cpu")


def test_measured_rates_are_kept_for_later_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache folder has the measured rates, used in later plans; a damaged file is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_local_device() == CPU
    assert load_local_device_model() == find_device_model("cpu")
    path = measure_and_save_calibration(CPU, CalibrationSizes(256, 2**20, 64), seconds=0.05)
    assert path == get_calibration_path(CPU) == tmp_path / "drawloom" / "devices" / "cpu.toml"
    device = load_local_device_model()
    assert device.name == "cpu"
    assert not device.is_gpu
    assert 1e8 < device.compute_achieved_matmul_flop_rate(torch.float32) < 1e13
    assert 1e8 < device.bandwidth * device.reached.memory < 1e12
    assert 1e8 < device.host_link < 1e12 and device.host_link != find_device_model("cpu").host_link
    assert 0 < device.reached.attention < 10
    assert 0 < device.reached.launch < 1e-3
    assert device.reached.host == 0
    path.write_text("garbage")
    with pytest.raises(
        UserError, match=r"cpu\.toml: Expected '='.*; measure it again with `drawloom plan --calibrate`"
    ):
        load_local_device_model()


def test_an_unknown_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A known GPU has the figures of the table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert attrs.evolve(load_local_device_model(), host_memory=0) == find_device_model("h200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Other 1")
    with pytest.raises(Exception, match="--calibrate"):
        load_local_device_model()
