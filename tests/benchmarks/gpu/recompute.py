"""
Savings and cost of activation checkpointing, in training steps by the components of a run: `make bench NAME=recompute`.

Every policy of `[stages] recompute` gets a line: tokens per second from the median of consecutive steps (the host
issues a step while the GPU computes the step before); the ratio to no recomputation; the host's time in the fastest
step that starts on an idle GPU; peak GiB; and the GiB that a forward pass keeps for the backward pass. `bits` compares
the loss and the gradient norm of the first step with the run without recomputation. Policies that run out of memory are
reported. Everything is bfloat16; the optimizer is AdamW with stochastic rounding.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import attrs  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from benchmarks.gpu.training import DENSE, SMALL, SPARSE  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.precision import DtypePolicy  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.distributed.sum_over_shards import SumOverParameters  # noqa: E402
from drawloom.components.gradients.clip_norm import ClipNorm  # noqa: E402
from drawloom.components.gradients.synchronize import Synchronize  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.loss.next_token import NextToken  # noqa: E402
from drawloom.components.model.llama import Llama  # noqa: E402
from drawloom.components.model.qwen3.dense import Qwen3Dense  # noqa: E402
from drawloom.components.model.qwen3.moe import Qwen3Moe  # noqa: E402
from drawloom.components.optim.stochastic_adamw import StochasticAdamW  # noqa: E402
from drawloom.components.pipeline.executor import ProgramExecutor  # noqa: E402
from drawloom.components.ports.data import TokenBatch  # noqa: E402
from drawloom.components.ports.pipeline import create_step_state  # noqa: E402
from drawloom.components.ports.run import Step  # noqa: E402
from drawloom.components.ports.stages import Recompute  # noqa: E402
from drawloom.components.stages.materialized import MaterializedStages  # noqa: E402
from drawloom.kernels.recompute.policy import apply_recompute_policy  # noqa: E402
from support import pipelines  # noqa: E402

GPU = torch.cuda.is_available()
BUDGET = 480.0
"""Seconds after which no further line starts."""

POLICIES: list[Recompute] = ["none", "selective", "quantized", 4, 2, "blocks"]

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
"""Llama-3-8B's shape."""


@attrs.frozen
class Case:
    """A model, and the rows and microbatches of a step."""

    name: str
    blueprint: Any
    sizes: dict[str, Any]
    rows: int
    length: int
    microbatches: int = 1


CASES = [
    Case("Qwen3-0.6B", Qwen3Dense, DENSE, 4, 4096),
    Case("Qwen3-0.6B, one row at a time", Qwen3Dense, DENSE, 1, 4096, 4),
    Case("Qwen3-0.6B, long rows", Qwen3Dense, DENSE, 1, 32768),
    Case("1B with 64 experts", Qwen3Moe, SPARSE, 4, 4096),
    Case("Llama-3-8B shape", Llama, LLAMA, 2, 4096),
]


def main() -> None:
    """Measure every policy with every model whose name contains one of the words."""
    if not GPU and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    if TINY and not GPU:
        from support.interpreter import repair

        repair()
    began = time.monotonic()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if GPU else 'a CPU'}")
    kind: Any = "cuda" if GPU else "cpu"
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    try:
        mesh = RankMesh(processes=processes)
        mesh.open()
        for case in CASES:
            if not words or any(word in case.name for word in words):
                _print_case(case, mesh, device, began)
    finally:
        processes.close()


def _print_case(case: Case, mesh: RankMesh, device: ComputeDevice, began: float) -> None:
    rows, length = (1, 8) if TINY else (case.rows, case.length)
    shape = f"{rows} x {length}" + (f" x {case.microbatches}" if case.microbatches > 1 else "")
    print(f"\n{f'{case.name}, {shape}':<46}{'tokens/s':>11}{'ratio':>8}{'host ms':>9}{'GiB':>8}{'kept':>8}{'bits':>7}")
    first: tuple[float, list[float]] | None = None
    for policy in POLICIES:
        try:
            if time.monotonic() - began > BUDGET:
                raise TimeoutError("the time is used up")
            speed, bits, line = _measure(case, policy, mesh, device, rows, length)
            first = first or (speed, bits)
            same = "same" if bits == first[1] else "other"
            line = f"{speed:>11,.0f}{speed / first[0]:>8.3f}{line}{same:>7}"
        except Exception as failure:  # the next policy runs
            line = f"  {type(failure).__name__}: {failure}".splitlines()[0][:70]
        print(f"  recompute = {policy!r:<32}{line}", flush=True)
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def _measure(
    case: Case, policy: Recompute, mesh: RankMesh, device: ComputeDevice, rows: int, length: int
) -> tuple[float, list[float], str]:
    """Return tokens per second, the first step's loss and gradient norm, and the other columns."""
    step, kept = _make_step(case, policy, mesh, device, rows, length)
    bits = [float(value) for value in step()]
    cost = clock.step_cost(step, device.device)
    host = clock.host_seconds(step, device.device)
    speed = rows * length * case.microbatches / cost.seconds
    return speed, bits, f"{host * 1e3:>9.1f}{cost.allocated:>8.1f}{kept / 2**30:>8.2f}"


def _make_step(
    case: Case, policy: Recompute, mesh: RankMesh, device: ComputeDevice, rows: int, length: int
) -> tuple[Callable[[], list[float]], int]:
    """Return a step, which returns loss and gradient norm, and the bytes that a forward pass keeps."""
    names = {key: value for key, value in case.sizes.items() if key not in ("model_type", "max_position_embeddings")}
    sizes = names | ({key: value for key, value in SMALL.items() if key in names} if TINY else {})
    kernels = AutoKernels(device=device)
    kernels.open()
    model = case.blueprint(kernels=kernels, **sizes)
    model.initialize_parameter = _initialise
    torch.manual_seed(0)
    schedule, loss, job = pipelines.schedule("one_f_one_b"), NextToken(), pipelines.Job()
    common: dict[str, Any] = {"mesh": mesh, "device": device, "schedule": schedule}
    precision = DtypePolicy(parameter="bfloat16", compute="bfloat16", gradient="bfloat16")
    stages = MaterializedStages(model=model, loss=loss, precision=precision, job=job, recompute=policy, **common)
    stages.open()
    executor = ProgramExecutor(stages=stages, objective=loss, **common)
    executor.open()
    phases: list[Any] = [
        Synchronize(parameters=stages, mesh=mesh, reduce=SumOverParameters(mesh=mesh)),
        ClipNorm(parameters=stages, max_norm=1.0),
        StochasticAdamW(parameters=stages, mesh=mesh, lr=1e-5, job=job, device=device),
    ]
    phases[2].open()
    host = torch.device("cpu")  # a run's batches start on the CPU
    batches = [_batch(number, host, sizes["vocab_size"], rows, length) for number in range(case.microbatches)]
    device_batch = _batch(0, device.device, sizes["vocab_size"], rows, length)

    def take_step() -> list[float]:
        step = Step(1, 1, create_step_state(batches))
        executor.run_forward_and_backward(step.state)
        for phase in phases:
            phase.run_phase(step)
        return [step.state["loss"] * step.state["loss_weight"], step.state["grad_norm"]]

    return take_step, _measure_kept_bytes(stages.local[0], loss, device_batch, policy)


def _measure_kept_bytes(stage: Any, loss: NextToken, batch: TokenBatch, policy: Recompute) -> int:
    """Return the device bytes that a second forward pass keeps; the first pass compiles kernels."""
    if not GPU:
        return 0
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with apply_recompute_policy(policy, stage.blocks):
            output = stage.module(*loss.inputs(batch), lambda hidden, head: loss.loss(hidden, head, batch)[0])
        left = torch.cuda.memory_allocated() - before
        del output
    return left


def _initialise(_name: str, parameter: Tensor, _seed: int, _part_of: Any = None) -> None:
    """Fill a parameter on its device, which is faster than a run's initial values."""
    parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def _batch(number: int, device: torch.device, vocabulary: int, rows: int, length: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator).to(device)
    positions = torch.arange(length, device=device).expand(rows, length).contiguous()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return TokenBatch(inputs, targets, positions, torch.zeros_like(positions), torch.ones_like(positions).float())


if __name__ == "__main__":
    main()
