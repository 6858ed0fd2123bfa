"""Calibration for plans: measures this machine's device and saves it in the user's cache folder."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from drawloom import UserError
from drawloom.components.distributed.device_model import (
    DeviceModel,
    Link,
    Reached,
    find_device_model,
    find_gpu_model,
    get_matmul_dtype_key,
)
from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.components.planning.attention import AttentionFractions
from drawloom.components.planning.stage_costs import PassCost, Recorder
from drawloom.components.storage.durable_files import replace_file
from drawloom.kernels.attention.eager import attention_flops

SECONDS = 1.0
"""
Seconds in which every kind of operation is repeated. On a CPU the fastest repetition counts, because others may be
disturbed; on a GPU the mean counts, because later operations have less power than the first.
"""

ROWS, HEADS, KV_HEADS, HEAD_SIZE = 4, 16, 8, 128
"""Shape of the timed attention; a GPU needs several rows, and libraries sum gradients of shared keys separately."""

HOST_LAYERS = 20
"""Layers whose host time is measured."""

HOST_TIME_RATIO = 1.4
"""
Host time of an operation of a model, relative to an operation of the measured layers.

Fitted to steps of three small host-bound models with one H100; they differ by 6 %.
"""

MEMORY_REACHED = 0.74
"""
Fraction of the bandwidth of additions to one large vector that a step reaches: norms and gates are smaller.

Fitted like the defaults of `Reached`, on a GPU whose additions reach 4.27 TB/s.
"""


@attrs.frozen
class CalibrationSizes:
    """Sizes that saturate a device: matrix order, vector size in bytes, and sequence length."""

    matrix: int
    vector: int
    length: int


SIZES = {"cpu": CalibrationSizes(1024, 2**27, 512), "cuda": CalibrationSizes(8192, 2**31, 4096)}


def choose_local_device() -> torch.device:
    """Return this machine's device for plans: the first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_calibration_path(device: torch.device) -> Path:
    """Return the path of a device's calibration."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).replace("/", "-")
    return root / "drawloom" / "devices" / f"{name}.toml"


HOST_FRACTION = 0.85
"""A host's memory fraction for state and activations; processes, caches and copies need the rest."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def _measure_host_memory_per_gpu() -> int:
    """Return the host memory per local GPU, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text("utf-8").strip() if CGROUP_LIMIT.is_file() else "max"
    total = min(total, int(limit)) if limit.isdigit() else total
    return int(HOST_FRACTION * total) // torch.cuda.device_count()


def load_local_device_model() -> DeviceModel:
    """
    Return this machine's device model: its calibration, or its table entry, with a GPU's share of the host's memory.

    Raises UserError without either.
    """
    device = choose_local_device()
    model = _load_calibration_or_table_entry(device)
    return model if device.type == "cpu" else attrs.evolve(model, host_memory=_measure_host_memory_per_gpu())


def _load_calibration_or_table_entry(device: torch.device) -> DeviceModel:
    """Return a device's calibration, or its table entry. Raises UserError without either."""
    if (path := get_calibration_path(device)).is_file():
        try:
            return find_device_model(str(path))
        except UserError as error:
            text = str(error).removeprefix("--device ")
            raise UserError(f"{text}; measure it again with `drawloom plan --calibrate`", 2) from error
    if device.type == "cpu":
        return find_device_model("cpu")
    if (known := find_gpu_model(name := torch.cuda.get_device_name(device))) is None:
        text = f"the table of devices has no {name!r}; measure it with `drawloom plan --calibrate`"
        raise UserError(f"{text}, or describe it in a TOML file and write --device FILE", 2)
    return known


def measure_and_save_calibration(
    device: torch.device, sizes: CalibrationSizes | None = None, seconds: float = SECONDS
) -> Path:
    """Measure a device for less than a minute, save its speeds as TOML, and return the path."""
    path = get_calibration_path(device)
    text = "\n".join(_measure_calibration_lines(device, sizes or SIZES[device.type], seconds))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{text}\n".encode())
    return path


def _measure_calibration_lines(device: torch.device, sizes: CalibrationSizes, seconds: float) -> Iterator[str]:
    """Yield the calibration as TOML; values that are not measured, such as links between devices, are the table's."""
    known = find_gpu_model(torch.cuda.get_device_name(device)) if device.type == "cuda" else find_device_model("cpu")
    known = known or find_device_model("a100")
    others = [torch.float32] if device.type == "cuda" else [torch.bfloat16, torch.float64]
    wide = torch.bfloat16 if device.type == "cuda" else torch.float32  # also the dtype for attention
    speeds = _measure_speeds(device, sizes, wide, 3 * seconds)
    rates = {wide: speeds.products} | {
        dtype: _count_matrix_product_flops(sizes)
        / _measure_seconds_per_call(device, _make_matrix_product(device, dtype, sizes), seconds)
        for dtype in others
    }
    for dtype, rate in rates.items():
        yield f"{get_matmul_dtype_key(dtype)} = {rate / 1e12:.6g}"
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    yield f"memory = {memory / 2**30:.6g}"
    yield f"bandwidth = {speeds.bandwidth / 1e9:.6g}"
    yield f"link = {known.link / 1e9:.6g}"
    yield f"network = {known.network / 1e9:.6g}"
    yield f"host_link = {_measure_host_link_bandwidth(device, sizes.vector // 2, seconds) / 1e9:.6g}"
    launch, host = _estimate_launch_and_host(device, seconds)
    yield "\n[reached]"
    yield "products = 1.0"
    yield f"attention = {speeds.attention / speeds.products:.4g}"
    yield f"memory = {_assume_reachable_bandwidth_fraction(device)}"
    yield f"launch = {launch:.4g}"
    yield f"host = {host:.4g}"


def _measure_seconds_per_call(
    device: torch.device, run: Callable[[], object], seconds: float, calls: int | None = None
) -> float:
    """Return the seconds per call. Several calls run between two clock reads, so a GPU never waits."""
    calls = calls or (1 if device.type == "cpu" else 10)
    run()
    times = list[float]()
    for _ in _repeat_for(seconds):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return min(times) if device.type == "cpu" else statistics.mean(times[len(times) // 2 :])


def _repeat_for(seconds: float) -> Iterator[None]:
    """Yield until the seconds have passed, at least once."""
    end = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end:
        yield


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@attrs.frozen
class _Speeds:
    """Measured speeds: FLOP/s in products, FLOP/s in attention's products, and bytes/s."""

    products: float
    attention: float
    bandwidth: float


def _measure_speeds(device: torch.device, sizes: CalibrationSizes, dtype: torch.dtype, seconds: float) -> _Speeds:
    """
    Measure every operation's sustained speed while the operations alternate as in a step.

    A second with only products would draw more power and lower the clock further than a step does, where products take
    three quarters of the time.
    """
    kinds = [
        _make_matrix_product(device, dtype, sizes),
        _make_attention_pass(device, dtype, sizes),
        _make_vector_addition(device, sizes.vector),
    ]
    if device.type == "cpu":
        products, attention, addition = (_measure_seconds_per_call(device, run, seconds / 3) for run in kinds)
    else:
        *_, products, attention, addition = _measure_alternating_seconds([kinds[0], kinds[0], *kinds], seconds)
    pairs, bandwidth = ROWS * HEADS * sizes.length**2 / 2, 2 * (sizes.vector // 4 * 4) / addition
    flops = sum(attention_flops(pairs, HEAD_SIZE, HEAD_SIZE, backward=backward) for backward in (False, True))
    inside = attention - _estimate_attention_traffic_seconds(device, dtype, sizes, bandwidth)
    return _Speeds(_count_matrix_product_flops(sizes) / products, flops / max(inside, attention / 2), bandwidth)


def _measure_alternating_seconds(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the mean seconds per operation on the GPU, measured in the later half."""
    for run in runs:  # the first call of attention loads a library, for seconds
        run()
    torch.cuda.synchronize()
    rounds = list[list[torch.cuda.Event]]()
    for _ in _repeat_for(seconds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]  # type: ignore[no-untyped-call]
        for mark, run in zip(marks, runs, strict=False):
            mark.record()
            run()
        marks[-1].record()
        rounds.append(marks)
        if len(rounds) % 10 == 0:  # so that the host is only a few rounds ahead
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    later = rounds[len(rounds) // 2 :]
    return [
        statistics.mean(marks[index].elapsed_time(marks[index + 1]) for marks in later) / 1e3
        for index in range(len(runs))
    ]


def _measure_host_link_bandwidth(device: torch.device, size: int, seconds: float) -> float:
    """Return bytes/s in each direction, for copies of this size to host memory and back at once."""
    transfers = DeviceTransfers(device)
    arriving, leaving = (transfers.allocate_pinned_host_memory(size) for _ in range(2))
    on_device = torch.zeros(2, size, dtype=torch.uint8, device=device)

    def copy_in_both_directions() -> None:
        transfers.copy_to_device([(on_device[0], arriving)])
        transfers.copy_to_host([(leaving, on_device[1])])
        transfers.synchronize()

    rate = size / _measure_seconds_per_call(device, copy_in_both_directions, seconds, 1)
    transfers.close()
    return rate


def _count_matrix_product_flops(sizes: CalibrationSizes) -> float:
    """Return the FLOPs in a product of two square matrices."""
    return 2.0 * sizes.matrix**3


def _make_matrix_product(device: torch.device, dtype: torch.dtype, sizes: CalibrationSizes) -> Callable[[], object]:
    """Return a function that multiplies square matrices."""
    a = torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype)
    return lambda: a @ a


def _make_vector_addition(device: torch.device, size: int) -> Callable[[], object]:
    """Return a function that reads, adds to and writes a vector."""
    x = torch.zeros(size // 4, device=device)
    return lambda: x.add_(1)


def _make_attention_pass(device: torch.device, dtype: torch.dtype, sizes: CalibrationSizes) -> Callable[[], object]:
    """Return a function that runs causal attention forward and backward."""
    # The import takes a second, and plans do not need it.
    from drawloom.kernels.attention.cudnn import ONE_DOCUMENT_PER_ROW, attention_cudnn

    shapes = ((ROWS, sizes.length, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    grad = torch.ones_like(q)
    return lambda: torch.autograd.grad(attention_cudnn(q, k, v, ONE_DOCUMENT_PER_ROW), (q, k, v), grad)


def _estimate_attention_traffic_seconds(
    device: torch.device, dtype: torch.dtype, sizes: CalibrationSizes, bandwidth: float
) -> float:
    """Return a plan's seconds for attention's memory traffic."""
    reached = Reached(attention=math.inf, memory=_assume_reachable_bandwidth_fraction(device), launch=0.0, host=0.0)
    model = attrs.evolve(find_device_model("h200"), bandwidth=bandwidth, reached=reached)
    return _trace_pass_cost_on_meta(_make_attention_pass(torch.device("meta"), dtype, sizes), model).seconds


def _trace_pass_cost_on_meta(run: Callable[[], object], model: DeviceModel) -> PassCost:
    """Record a call on meta tensors, as a plan does, and return the costs."""
    recorder = Recorder(model, lambda _: Link(math.inf), AttentionFractions())
    with recorder:
        recorder.begin_pass()
        run()
        return recorder.end_pass()


def _assume_reachable_bandwidth_fraction(device: torch.device) -> float:
    """Return which fraction of the memory bandwidth kernels reach."""
    return MEMORY_REACHED if device.type == "cuda" else 1.0


def _estimate_launch_and_host(device: torch.device, seconds: float) -> tuple[float, float]:
    """
    Return an operation's least seconds on the device, and the host's seconds to issue an operation.

    On a CPU, the first is a measured small operation's time, and the second 0. On a GPU, the first is not measured, but
    the default of `Reached`; the second is derived from measured host-bound layers.
    """
    if device.type == "cpu":
        x = torch.zeros(16)
        return _measure_seconds_per_call(device, lambda: x.add_(1), seconds, 1000), 0.0
    layers = _make_host_bound_pass(device)
    for _ in range(3):  # the first call compiles kernels
        layers()
    times = list[float]()
    for _ in _repeat_for(seconds):
        start = time.perf_counter()
        layers()
        times.append(time.perf_counter() - start)
    return Reached().launch, HOST_TIME_RATIO * statistics.median(times) / _count_planned_host_operations()


def _make_host_bound_pass(device: torch.device) -> Callable[[], object]:
    """Return a function that runs norms and linear layers forward and backward, tiny so that the host is the limit."""
    from drawloom.kernels.linear import linear_eager
    from drawloom.kernels.rms_norm.triton import rms_norm_triton

    shapes = [*[(32,)] * HOST_LAYERS, *[(32, 32)] * HOST_LAYERS]
    tensors = [
        torch.ones(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in ((8, 32), *shapes)
    ]
    pairs = list(zip(tensors[1 : HOST_LAYERS + 1], tensors[HOST_LAYERS + 1 :], strict=True))

    def run_layers() -> object:
        x = tensors[0]
        for scale, weight in pairs:
            x = linear_eager(rms_norm_triton(x, scale, 1e-6), weight)
        return torch.autograd.grad(x, tensors, torch.ones_like(x))

    return run_layers


def _count_planned_host_operations() -> float:
    """Return how many small operations a plan counts in the measured layers."""
    model = attrs.evolve(find_device_model("h200"), reached=Reached(host=1.0))
    return _trace_pass_cost_on_meta(_make_host_bound_pass(torch.device("meta")), model).host
