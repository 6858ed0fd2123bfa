"""Calibration of plans on a GPU."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.distributed.device_model import find_gpu_model
from drawloom.components.planning import calibrate
from drawloom.components.planning.calibrate import load_local_device_model

pytestmark = [pytest.mark.gpu]
GPU = torch.device("cuda")


def test_slow_first_calls_do_not_change_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A library that takes longer to load than the measurement does not change the result.

    The limits around the device table are wide, since sizes are small and other processes may use the GPU.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded, attention = list[bool](), calibrate._make_attention_pass

    def load_slowly(device: torch.device, *sizes: Any) -> object:
        run = attention(device, *sizes)

        def slow() -> object:
            if not loaded:
                loaded.append(True)
                time.sleep(2)
            return run()

        return slow

    monkeypatch.setattr(calibrate, "_make_attention_pass", load_slowly)
    calibrate.measure_and_save_calibration(GPU, seconds=0.2)
    measured, known = load_local_device_model(), find_gpu_model(torch.cuda.get_device_name())
    assert loaded
    assert 0.1 < measured.reached.attention < 2
    assert 1e9 < measured.host_link < 1e12
    if known is not None:
        assert 0.5 < measured.bandwidth / known.bandwidth < 1.1
