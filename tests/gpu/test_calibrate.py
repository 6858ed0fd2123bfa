"""Measuring a GPU for plans."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.distributed.device_model import model_of_gpu
from drawloom.components.planning import calibrate
from drawloom.components.planning.calibrate import at_hand

pytestmark = [pytest.mark.gpu]
GPU = torch.device("cuda")


def test_what_only_a_first_call_takes_counts_as_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A library that loads for longer than is measured changes nothing: what is found is within reach of the table.

    The limits are wide, since the sizes are small and others may use the GPU.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded, attention = list[bool](), calibrate._attention

    def loading(device: torch.device, *sizes: Any) -> object:
        run = attention(device, *sizes)

        def slow() -> object:
            if not loaded:
                loaded.append(True)
                time.sleep(2)
            return run()

        return slow

    monkeypatch.setattr(calibrate, "_attention", loading)
    calibrate.calibrate(GPU, seconds=0.2)
    found, known = at_hand(), model_of_gpu(torch.cuda.get_device_name())
    assert loaded
    assert 0.1 < found.reached.attention < 2
    if known is not None:
        assert 0.5 < found.bandwidth / known.bandwidth < 1.1
