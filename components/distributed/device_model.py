"""Device performance models: data sheets (`devices.toml`), and the fractions of their figures reached in training."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch

from drawloom import UserError
from drawloom.graph.problems import did_you_mean

TABLE = Path(__file__).with_name("devices.toml")


@attrs.frozen(kw_only=True)
class Reached:
    """
    Fractions of a data sheet's figures reached in a training step, and host overheads.

    `products` is the fraction for matrix products, `float8` for products in float8, `attention` for products inside
    cuDNN's attention; the kernel for packed rows reaches the fraction `packed` of it. `memory` is the fraction of the
    memory bandwidth, `links` of the rate between a host's devices, and `networks` of the rate between hosts, which was
    not measured. In seconds, `latency` is a message's time between a host's devices besides its bytes, `launch` an
    operation's on the device besides its work, and `host` the host's time to issue an operation.

    Most defaults are fitted to steps of two dense models, Qwen3-0.6B and a Llama-3-8B shape, in rows of one document of
    4096 tokens on one H200 and of 8,192 and 32,768 on one H100 (`make bench NAME=breakdown`), whose plans are 0.2 to
    6 % off. `launch` agrees with 16 microbatches of Qwen3-0.6B in CUDA graphs, and `host` is fitted to them without
    graphs. `float8` is from the products in a traced step (`make bench NAME=float8`), `packed` from kernels alone
    (`make bench NAME=kernels ONLY=attention`), `links` and `latency` from gathers of 64 MB to 1 GB between two H200
    (`make bench NAME=several ONLY=--links`). `drawloom plan --calibrate` measures these numbers on a machine.
    """

    products: float = 0.71
    float8: float = 0.66
    attention: float = 0.53
    packed: float = 0.6
    memory: float = 0.65
    links: float = 0.61
    networks: float = 0.75
    latency: float = 40e-6
    launch: float = 3e-6
    host: float = 60e-6


REACHED_BY_CPU = Reached(products=1.0, attention=0.5, memory=1.0, host=0.0)
"""Fractions for a CPU: its table has reached figures, and it is its own host."""


@attrs.frozen
class Link:
    """Connection between ranks: its bytes/s by data sheet, the fraction reached, and a message's latency in seconds."""

    bandwidth: float
    reached: float = 1.0
    latency: float = 0.0

    def estimate_seconds(self, sent: float, messages: int = 1) -> float:
        """Return the seconds in which a rank sends `sent` bytes in some messages, one after another."""
        return messages * self.latency + sent / (self.bandwidth * self.reached)


@attrs.frozen(kw_only=True)
class DeviceModel:
    """
    Kind of device: peak FLOP/s of products by dtype, memory in bytes, bandwidths in bytes/s, and fractions reached.

    `link` connects the `per_host` devices of a host, and `network` connects hosts, both in bytes/s of a device in one
    direction. `host_link` connects a device and host memory; each device may use `host_memory` bytes there.
    `workspace` is its libraries' memory in bytes. A memory of 0 bytes is unknown.
    """

    name: str
    peaks: Mapping[str, float]
    memory: int
    bandwidth: float
    link: float
    network: float
    per_host: int = 8
    host_link: float = 50e9  # reached with PCIe 5.0 x16, whose rate is 63 GB/s in each direction
    host_memory: int = 0
    workspace: int = 0
    reached: Reached = Reached()

    def without_host_time(self) -> "DeviceModel":
        """Return the same device without the host's time per operation, as in a CUDA graph."""
        return attrs.evolve(self, reached=attrs.evolve(self.reached, host=0.0))

    def find_link(self, ranks: Sequence[int]) -> Link:
        """Return the link between ranks; a group's ranks on one host share its network cards."""
        hosts = {rank // self.per_host for rank in ranks}
        if len(hosts) == 1:
            return Link(self.link, self.reached.links, self.reached.latency)
        return Link(min(self.link, self.network * len(ranks) / len(hosts)), self.reached.networks)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, on which GPU kernels run."""
        return self.name != "cpu"

    def get_matmul_peak(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s by data sheet for products in a dtype, or in the nearest one if the table has no entry."""
        peak = self.peaks.get(get_matmul_dtype_key(dtype))
        return peak or self.peaks.get("float32") or min(self.peaks.values())

    def compute_achieved_matmul_flop_rate(self, dtype: torch.dtype) -> float:
        """Return the reached FLOP/s for products in a dtype."""
        fraction = self.reached.float8 if get_matmul_dtype_key(dtype) == "float8" else self.reached.products
        return self.get_matmul_peak(dtype) * fraction


@cache
def read_device_table() -> list[dict[str, Any]]:
    """Return the rows in the table of devices, `devices.toml`."""
    return list(_read_toml(TABLE)["device"])


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def find_device_model(key_or_path: str) -> DeviceModel:
    """Return a device by its key in the table or its TOML file. Raises UserError if there is no such device."""
    keyed = {row["key"]: row for row in read_device_table() if "key" in row}
    if key_or_path in keyed:
        return _build_device_model(keyed[key_or_path], key_or_path)
    path = Path(key_or_path)
    if not path.exists():
        raise UserError(
            f"--device {key_or_path}: there is no such device or TOML file; {did_you_mean(key_or_path, keyed)}", 2
        )
    try:
        return _build_device_model(_read_toml(path), path.stem)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        needed = f"{', '.join(NEEDED)}, and the peak of at least one of {', '.join(DTYPES)}"
        raise UserError(f"--device {key_or_path}: {reason}; write numbers for {needed}", 2) from error


def find_gpu_model(name: str) -> DeviceModel | None:
    """Return the device with a name from torch; None if the table has no such device with data for plans."""
    for row in read_device_table():
        if fnmatchcase(name, row["name"]) and "memory" in row:
            return _build_device_model(row, row["key"])
    return None


def _build_device_model(row: Mapping[str, Any], name: str) -> DeviceModel:
    """Build a device from its row in a table. Raises ValueError for a missing, unknown or impossible figure."""
    figures = {key: row[key] for key in row.keys() - {"name", "key", "source"}}
    _check_device_figures(figures, {*NEEDED, *DTYPES, "per_host", "host_link", "reached"})
    if missing := [key for key in NEEDED if key not in row] or ["bfloat16"] * row.keys().isdisjoint(DTYPES):
        raise ValueError(f"it has no {missing[0]!r}")
    reached = Reached(**row.get("reached", {}))
    is_gpu = name != "cpu"
    return DeviceModel(
        name=name,
        peaks={key: float(row[key]) * 1e12 for key in DTYPES if key in row},
        memory=int(row["memory"] * 2**30),
        bandwidth=row["bandwidth"] * 1e9,
        link=row["link"] * 1e9,
        network=row["network"] * 1e9,
        per_host=row.get("per_host", 8),
        host_link=row.get("host_link", 50.0) * 1e9,
        # cuBLAS keeps 32 MiB for products on Hopper, and another 32 MiB for products with an epilogue.
        workspace=64 * 2**20 if is_gpu else 0,
        reached=reached if is_gpu or "reached" in row else REACHED_BY_CPU,
    )


DTYPES = ("float8", "bfloat16", "tf32", "float32", "float64")
FASTER_PRODUCTS = {"float8": "float8.training"}
"""Features that compute products in a faster dtype, by the dtype."""

NEEDED = ("memory", "bandwidth", "link", "network")
# 0 bytes of memory are unknown, as a CPU's
MAY_BE_ZERO = {"memory", "reached.latency", "reached.launch", "reached.host"}


def _check_device_figures(row: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    """Raise ValueError for an entry that is not a device figure, or has an impossible value."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ValueError(f"{name!r} is not a figure of a device")
        if name == "reached":
            if not isinstance(value, dict):
                raise ValueError(f"{name} = {value!r} is not a table")
            _check_device_figures(value, {field.name for field in attrs.fields(Reached)}, "reached.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} = {value!r} is not a number from 0 on")
        elif not value and name not in MAY_BE_ZERO:
            raise ValueError(f"{name} is 0")


def get_matmul_dtype_key(dtype: torch.dtype) -> str:
    """Return the table's key, such as "bfloat16" or "tf32", for the peak FLOP/s of products in a dtype."""
    if dtype in (torch.bfloat16, torch.float16):
        return "bfloat16"
    if dtype.itemsize == 1:
        return "float8"
    if dtype == torch.float32:
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return str(dtype).removeprefix("torch.")


def get_peak_tflops(device: str, products: str) -> float | None:
    """Return a device's TFLOP/s, by its name and its products' key; None if the table has no such entry."""
    for row in read_device_table():
        if fnmatchcase(device, row["name"]):
            return float(row[products]) if products in row else None
    return None
