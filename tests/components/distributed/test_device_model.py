"""Device capabilities."""

import re
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch

from drawloom.components.distributed.device_model import (
    find_device_model,
    find_gpu_model,
    get_matmul_dtype_key,
    get_peak_tflops,
    read_device_table,
)
from drawloom.graph import UserError


@pytest.mark.parametrize(
    ("name", "products", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA GH200 480GB", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA B200", "float32", None),
        ("NVIDIA H100 PCIe", "float64", None),
    ],
)
def test_names_of_devices_are_found(name: str, products: str, peak: float | None) -> None:
    """Devices are found by the names torch gives them."""
    assert get_peak_tflops(name, products) == peak


def test_every_row_of_the_table_has_its_source() -> None:
    """Rows for planning are read strictly; TF32 is half as fast as bfloat16: no number has sparsity."""
    for row in read_device_table():
        if row["name"] == "cpu":
            continue
        assert re.match(r"(NVIDIA|AMD) ", row["source"])
        assert "memory" not in row or find_device_model(row["key"]).memory > 2**36
        assert row.get("tf32", row["bfloat16"] / 2) == pytest.approx(row["bfloat16"] / 2, rel=0.02)


def test_float32_is_multiplied_as_torch_says() -> None:
    """In TF32 where device.tf32 has told torch so."""
    assert get_matmul_dtype_key(torch.float16) == get_matmul_dtype_key(torch.bfloat16) == "bfloat16"
    for precision, products in (("highest", "float32"), ("high", "tf32")):
        with mock.patch.object(torch, "get_float32_matmul_precision", return_value=precision):
            assert get_matmul_dtype_key(torch.float32) == products


def test_a_gpu_is_found_by_its_name() -> None:
    """A GPU is matched by its product name; one without a memory size in the table can't be planned for."""
    gpu = find_gpu_model("NVIDIA H100 80GB HBM3")
    assert gpu == find_device_model("h100")
    assert gpu is not None
    assert gpu.is_gpu
    assert not find_device_model("cpu").is_gpu
    assert find_gpu_model("NVIDIA GeForce RTX 4090") is None


def test_links_of_a_host_and_networks_have_rates_of_their_own() -> None:
    """
    What messages reach within a host changes no time between hosts, and the other way round. Ranks on one host share
    its network cards, and only messages within a host have a latency.
    """
    device = find_device_model("h200")
    changes = ({"links": 0.1, "latency": 1.0}, {"networks": 0.1})
    within, between = range(8), range(16)
    for (slower, other), change in zip(((within, between), (between, within)), changes, strict=True):
        changed = attrs.evolve(device, reached=attrs.evolve(device.reached, **change))
        assert changed.find_link(slower).estimate_seconds(1e9) > device.find_link(slower).estimate_seconds(1e9)
        assert changed.find_link(other) == device.find_link(other)
    assert device.find_link((0, 8)).bandwidth == device.network
    assert device.find_link((0, 1, 8, 9)).bandwidth == 2 * device.network
    link = device.find_link((0, 1))
    seconds = [link.estimate_seconds(1e9, messages) for messages in (1, 5)]
    assert seconds[1] - seconds[0] == pytest.approx(4 * device.reached.latency)
    assert device.find_link((0, 8)).latency == 0


DESCRIBED = "bfloat16 = 100\nfloat32 = 50\nmemory = 8\nbandwidth = 500\nlink = 10\nnetwork = 1\n"


def test_a_device_may_be_described_in_a_file(tmp_path: Path) -> None:
    """The units are data sheets'; products have the rate reached in steps, also in a dtype without a figure."""
    path = tmp_path / "mine.toml"
    path.write_text(f"{DESCRIBED}[reached]\nproducts = 0.5\n")
    described = find_device_model(str(path))
    assert (described.name, described.memory, described.bandwidth, described.link) == ("mine", 2**33, 500e9, 10e9)
    assert described.compute_achieved_matmul_flop_rate(torch.bfloat16) == 50e12
    assert described.compute_achieved_matmul_flop_rate(torch.float64) == 25e12


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "there is no such device or TOML file; did you mean 'h100'?"),
        ("bfloat16 = 1\n", "it has no 'memory'"),
        (DESCRIBED + "colour = 1\n", "'colour' is not a figure of a device"),
        (DESCRIBED + "[reached]\nspeed = 1\n", "'reached.speed' is not a figure of a device"),
        (DESCRIBED.replace("8", "-8"), "memory = -8 is not a number from 0 on"),
        (DESCRIBED.replace("8", "'8'"), "memory = '8' is not a number"),
        (DESCRIBED.replace("10\n", "inf\n"), "link = inf is not a number"),
        (DESCRIBED.replace("500", "0"), "bandwidth is 0"),
        (DESCRIBED + "reached = 1\n", "reached = 1 is not a table"),
        (DESCRIBED + "[reached]\nproducts = true\n", "reached.products = True is not a number"),
        (DESCRIBED.split("\n", 2)[2], "it has no 'bfloat16'"),
        ("= 1", "Invalid"),
    ],
)
def test_a_device_that_is_not_described_is_an_error(text: str | None, reason: str, tmp_path: Path) -> None:
    """The error is one sentence with the keys of a device."""
    path = tmp_path / "mine.toml"
    path.write_text(text or "")
    with pytest.raises(UserError, match=reason):
        find_device_model("h10" if text is None else str(path))
