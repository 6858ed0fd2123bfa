"""Measures what the device of this machine reaches, for plans, and keeps it in the user's cache folder."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch

from drawloom.components.distributed.device_model import DeviceModel, device_model, model_of_gpu, products_in
from drawloom.components.planning.recorder import attention_flops
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError

SECONDS = 1.0
"""
How long each kind of operation is repeated. Of a CPU the fastest repetition counts, as others may be disturbed; of a
GPU their mean, as products that last have less power than the first ones.
"""

MEMORY_REACHED = 0.56
"""
What a step reaches of a GPU's bandwidth, as additions to one large vector show it: norms and gates are smaller.

Fitted as the defaults of `Reached` are, on a GPU whose additions reach 4.27 TB/s.
"""


@attrs.frozen
class Sizes:
    """Sizes that are large enough for a device: of matrices, of a vector in bytes, and of attention in tokens."""

    matrix: int
    vector: int
    length: int


SIZES = {"cpu": Sizes(1024, 2**27, 512), "cuda": Sizes(8192, 2**31, 4096)}


def here() -> torch.device:
    """The device of this machine that plans are for: its first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kept_at(device: torch.device) -> Path:
    """Where the figures of a device of this machine are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).replace("/", "-")
    return root / "drawloom" / "devices" / f"{name}.toml"


def at_hand() -> DeviceModel:
    """The device of this machine: as it was measured, or else as the table has it; UserError if it does not."""
    device = here()
    if (path := kept_at(device)).is_file():
        return device_model(str(path))
    if device.type == "cpu":
        return device_model("cpu")
    if (found := model_of_gpu(name := torch.cuda.get_device_name(device))) is None:
        text = f"the table of devices has no {name!r}; measure it with `drawloom plan --calibrate`"
        raise UserError(f"{text}, or describe it in a TOML file and write --device FILE", 2)
    return found


def calibrate(device: torch.device, sizes: Sizes | None = None, seconds: float = SECONDS) -> Path:
    """Measure a device, which takes less than a minute, and keep what it reaches; returns the file."""
    path = kept_at(device)
    text = "\n".join(_lines(device, sizes or SIZES[device.type], seconds))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{text}\n".encode())
    return path


def _lines(device: torch.device, sizes: Sizes, seconds: float) -> Iterator[str]:
    """The figures as TOML; of what is not measured, such as links, those of the table."""
    known = model_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else device_model("cpu")
    known = known or device_model("a100")
    rates = {dtype: _products(device, dtype, sizes.matrix, seconds) for dtype in _dtypes(device)}
    wide = rates[torch.bfloat16 if device.type == "cuda" else torch.float32]
    for dtype, rate in rates.items():
        yield f"{products_in(dtype)} = {rate / 1e12:.6g}"
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    yield f"memory = {memory / 2**30:.6g}"
    yield f"bandwidth = {_bandwidth(device, sizes.vector, seconds) / 1e9:.6g}"
    yield f"link = {known.link / 1e9:.6g}"
    yield f"network = {known.network / 1e9:.6g}"
    launch, host = _launches(device, seconds)
    yield "\n[reached]"
    yield "products = 1.0"
    yield f"attention = {_attention(device, sizes.length, seconds) / wide:.4g}"
    yield f"memory = {MEMORY_REACHED if device.type == 'cuda' else 1.0}"
    yield f"launch = {launch:.4g}"
    yield f"host = {host:.4g}"


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float32] + ([torch.float64] if device.type == "cpu" else [])


def _duration(device: torch.device, run: Callable[[], object], seconds: float, calls: int | None = None) -> float:
    """Seconds of a call, of which some follow one another between two looks at the clock: a GPU must not wait."""
    calls = calls or (1 if device.type == "cpu" else 10)
    run()
    times, end = list[float](), time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        times.append((time.perf_counter() - start) / calls)
    return min(times) if device.type == "cpu" else statistics.mean(times[len(times) // 2 :])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of products of square matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _duration(device, lambda: a @ a, seconds)


def _bandwidth(device: torch.device, size: int, seconds: float) -> float:
    """Bytes/s that an addition reads and writes."""
    x = torch.zeros(size // 4, device=device)
    return 2 * x.nbytes / _duration(device, lambda: x.add_(1), seconds)


def _attention(device: torch.device, length: int, seconds: float) -> float:
    """FLOP/s of causal attention, forward and backward, of the products that it can't do without."""
    # Takes a second to import, which plans do not need.
    from drawloom.kernels.attention_cudnn import WHOLE_ROWS, attention_cudnn

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, length, 16, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.ones_like(q)

    def both() -> object:
        return torch.autograd.grad(attention_cudnn(q, k, v, WHOLE_ROWS), (q, k, v), grad)

    flops = attention_flops(q.numel(), length) + attention_flops(q.numel(), length, backward=True)
    return flops / 2 / _duration(device, both, seconds)


def _launches(device: torch.device, seconds: float) -> tuple[float, float]:
    """Seconds of a small operation on the device, and of the host that issues one; a CPU is both."""
    x = torch.zeros(16, device=device)
    if device.type == "cpu":
        return _duration(device, lambda: x.add_(1), seconds, 1000), 0.0
    start = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    host = (time.perf_counter() - start) / 1000
    # Autograd and Python around an operation take about as long as the launch itself.
    return 3e-6, 2 * host
