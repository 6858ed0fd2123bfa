"""
Cost of precision, in one run of less than five minutes: `make bench NAME=precision`.

The components of a run train Qwen3-0.6B, gradient norm, clipping and AdamW included: all in bfloat16, with float32
master weights and bfloat16 compute, and all in float32 with TF32 and without. Then follows the float32 cross entropy
over the vocabulary, compared with its three matrix products (four for `cut`, which computes logits twice). The final
table has tokens per second from the median of consecutive steps: the host issues a step while the GPU computes the step
before. `host ms` is the host's time in the fastest step that starts on an idle GPU. The slowest kernels are listed
below a line.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import attrs  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from benchmarks.gpu.training import DENSE, SMALL  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.precision import DtypePolicy  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.distributed.sum_over_shards import SumOverParameters  # noqa: E402
from drawloom.components.gradients.clip_norm import ClipNorm  # noqa: E402
from drawloom.components.gradients.synchronize import Synchronize  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.loss.next_token import NextToken  # noqa: E402
from drawloom.components.model.qwen3.dense import Qwen3Dense  # noqa: E402
from drawloom.components.optim.adamw import AdamW  # noqa: E402
from drawloom.components.optim.stochastic_adamw import StochasticAdamW  # noqa: E402
from drawloom.components.pipeline.executor import ProgramExecutor  # noqa: E402
from drawloom.components.ports.data import TokenBatch  # noqa: E402
from drawloom.components.ports.pipeline import create_step_state  # noqa: E402
from drawloom.components.ports.run import Step  # noqa: E402
from drawloom.components.stages.materialized import MaterializedStages  # noqa: E402
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton, linear_cross_entropy_triton  # noqa: E402
from support import pipelines  # noqa: E402

LENGTH = 12 if TINY else 4096
BUDGET = 270.0
"""Seconds after which no further case starts."""
KERNELS = 6
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
NAMES = {key: value for key, value in DENSE.items() if key not in ("model_type", "max_position_embeddings")}

Dtype = Literal["bfloat16", "float32"]


@attrs.frozen
class Case:
    """Dtypes, optimizer, and the rows and microbatches of a step."""

    name: str
    parameter: Dtype
    compute: Dtype
    rows: int
    microbatches: int = 1
    stochastic: bool = False
    tf32: bool = False

    @property
    def shape(self) -> str:
        """Return rows x length, and the number of microbatches if there are several."""
        return f"{self.rows} x {LENGTH}" + (f" x {self.microbatches}" if self.microbatches > 1 else "")


@attrs.frozen
class Cost:
    """Seconds of a step and its host, peak GiB, and the slowest kernels in milliseconds."""

    seconds: float
    host_seconds: float
    gibibytes: float
    kernels: list[tuple[str, float]]


def cases() -> Iterator[Case]:
    """Yield all cases; compared cases are neighbours."""
    for rows, microbatches in ((4, 1), (1, 4)):
        yield Case("bfloat16, stochastic AdamW", "bfloat16", "bfloat16", rows, microbatches, stochastic=True)
        yield Case("bfloat16, AdamW", "bfloat16", "bfloat16", rows, microbatches)
        yield Case("float32 masters, bfloat16 compute", "float32", "bfloat16", rows, microbatches)
    yield Case("float32 with TF32", "float32", "float32", 1, tf32=True)
    yield Case("float32", "float32", "float32", 1)


def main() -> None:
    """Measure every case, and print a table at the end."""
    if not GPU and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    if TINY and not GPU:
        from support.interpreter import repair

        repair()
    began = time.monotonic()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    where = torch.cuda.get_device_name() if GPU else "a CPU"
    lines = [f"torch {torch.__version__} on {where}", *_losses(words, began)]
    kind: Any = "cuda" if GPU else "cpu"
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    try:
        mesh = RankMesh(processes=processes)
        mesh.open()
        lines += _trainings(mesh, device, words, began)
    finally:
        processes.close()
    print("\n" + "\n".join(lines))


def _trainings(mesh: RankMesh, device: ComputeDevice, words: list[str], began: float) -> list[str]:
    lines = [f"\n{'Qwen3-0.6B':<36}{'rows':>14}{'tokens/s':>11}{'ratio':>8}{'ms':>9}{'host ms':>9}{'GiB':>7}"]
    best: Counter[tuple[int, int]] = Counter()
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        text = f"{case.name:<36}{case.shape:>14}"
        cost = _attempt(lambda: _measure_case(case, mesh, device), began)  # noqa: B023
        if isinstance(cost, str):
            lines.append(f"{text}  {cost}")
        else:
            speed = round(case.rows * case.microbatches * LENGTH / cost.seconds)
            shape = case.rows, case.microbatches
            if case.parameter == "bfloat16":
                best[shape] = max(best[shape], speed)
            ratio = f"{speed / best[shape]:.3f}" if best[shape] else "-"
            text += f"{speed:>11,}{ratio:>8}{cost.seconds * 1e3:>9.1f}{cost.host_seconds * 1e3:>9.1f}"
            lines.append(f"{text}{cost.gibibytes:>7.1f}")
            lines += [f"    {milliseconds:>9.2f} ms  {kernel[:90]}" for kernel, milliseconds in cost.kernels]
        print(lines[-1 if isinstance(cost, str) else -1 - len(cost.kernels)], flush=True)
    return [*lines, "ratio: to the fastest in bfloat16 of the same rows; the goal for float32 masters is 0.95"]


def _attempt(measure: Callable[[], Cost], began: float) -> Cost | str:
    """Return the measured cost, or why there is none."""
    if time.monotonic() - began > BUDGET:
        return "not measured: the time is used up"
    try:
        return measure()
    except Exception as failure:  # the next case runs
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:100]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _measure_case(case: Case, mesh: RankMesh, device: ComputeDevice) -> Cost:
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        return _measure(_make_step(case, mesh, device))
    finally:
        torch.set_float32_matmul_precision("highest")


def _make_step(case: Case, mesh: RankMesh, device: ComputeDevice) -> Callable[[], None]:
    config = NAMES | ({key: value for key, value in SMALL.items() if key in NAMES} if TINY else {})
    kernels = AutoKernels(device=device)
    kernels.open()
    model = Qwen3Dense(kernels=kernels, **config)
    model.initialize_parameter = _initialise  # type: ignore[assignment,method-assign]
    precision = DtypePolicy(parameter=case.parameter, compute=case.compute, gradient=case.parameter)
    schedule, loss, job = pipelines.schedule("one_f_one_b"), NextToken(), pipelines.Job()
    common: dict[str, Any] = {"mesh": mesh, "device": device, "schedule": schedule}
    stages = MaterializedStages(model=model, loss=loss, precision=precision, job=job, **common)
    stages.open()
    executor = ProgramExecutor(stages=stages, objective=loss, **common)
    executor.open()
    synchronize = Synchronize(parameters=stages, mesh=mesh, reduce=SumOverParameters(mesh=mesh))
    clip = ClipNorm(parameters=stages, max_norm=1.0)
    optimizer: Any = AdamW(parameters=stages, mesh=mesh, lr=1e-5)
    if case.stochastic:
        optimizer = StochasticAdamW(parameters=stages, mesh=mesh, lr=1e-5, job=job, device=device)
    optimizer.open()
    host = torch.device("cpu")  # a run's batches start on the CPU
    batches = [_batch(number, host, config["vocab_size"], case.rows) for number in range(case.microbatches)]

    def take_step() -> None:
        step = Step(1, 1, create_step_state(batches))
        executor.run_forward_and_backward(step.state)
        for phase in (synchronize, clip, optimizer):
            phase.run_phase(step)

    return take_step


def _initialise(_name: str, parameter: Tensor, _seed: int, _part_of: Any = None) -> None:
    """Fill a parameter on its device, which is faster than a run's initial values."""
    parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def _batch(number: int, device: torch.device, vocabulary: int, rows: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (rows, LENGTH + 1), generator=generator).to(device)
    positions = torch.arange(LENGTH, device=device).expand(rows, LENGTH).contiguous()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return TokenBatch(inputs, targets, positions, torch.zeros_like(positions), torch.ones_like(positions).float())


def _measure(step: Callable[[], object]) -> Cost:
    cost = clock.step_cost(step, DEVICE)
    return Cost(cost.seconds, clock.host_seconds(step, DEVICE), cost.allocated, _kernels(step))


def _kernels(step: Callable[[], object]) -> list[tuple[str, float]]:
    """Return the slowest kernels of a step in milliseconds; empty on a CPU."""
    if not GPU:
        return []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as running:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    assert running.profiler is not None and running.profiler.kineto_results is not None
    for event in running.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()):
            spent[event.name()] += event.duration_ns()
    return [(name, nanoseconds / 1e6) for name, nanoseconds in spent.most_common(KERNELS)]


def _losses(words: list[str], began: float) -> list[str]:
    """Measure the float32 cross entropy and its bare matrix products, with TF32 and without."""
    if words and not any(word in "cross entropy" for word in words):
        return []
    tokens, width, vocabulary = (8, 32, 64) if TINY else (8192, 1024, 151936)
    hidden = torch.randn(tokens, width, device=DEVICE).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    lines = [f"\n{f'float32 cross entropy, {tokens} x {width} x {vocabulary}':<50}{'ms':>9}{'of products':>13}"]
    for tf32 in (True, False):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        bare: dict[str, float] = {}
        for name, products, function in LOSSES:
            text = f"{name}, {'TF32' if tf32 else 'no TF32'}"
            cost = _attempt(lambda: _measure(lambda: function(hidden, weight, targets)), began)  # noqa: B023
            if isinstance(cost, str):
                lines.append(f"{text:<50}  {cost}")
                continue
            bare[name] = cost.seconds
            ratio = cost.seconds / bare[products] if products in bare else float("nan")
            lines.append(f"{text:<50}{cost.seconds * 1e3:>9.2f}{ratio:>13.2f}")
            print(lines[-1], flush=True)
    torch.set_float32_matmul_precision("highest")
    return [*lines, "of products: times of the bare products; the goal is 1.3"]


def _multiply_thrice(hidden: Tensor, weight: Tensor, _targets: Tensor) -> object:
    with torch.no_grad():
        logits = hidden @ weight.T
        return logits @ weight, logits.T @ hidden


def _multiply_four_times(hidden: Tensor, weight: Tensor, targets: Tensor) -> object:
    with torch.no_grad():
        _ = hidden @ weight.T
    return _multiply_thrice(hidden, weight, targets)


def _both_ways(losses: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor, Tensor], object]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> object:
        return torch.autograd.grad(losses(hidden, weight, targets)[0].sum(), [hidden, weight])

    return run


LOSSES: list[tuple[str, str, Callable[[Tensor, Tensor, Tensor], object]]] = [
    ("three products", "three products", _multiply_thrice),
    ("triton", "three products", _both_ways(linear_cross_entropy_triton)),
    ("four products", "four products", _multiply_four_times),
    ("cut", "four products", _both_ways(cut_cross_entropy_triton.__call__)),
]
"""Name, the name of the baseline, and the measured function."""


if __name__ == "__main__":
    main()
