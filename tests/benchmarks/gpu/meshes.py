"""
Meshes of several GPUs compared with one GPU and with plain FSDP2, in one run: `make bench NAME=meshes RANKS=2`.

The models are Qwen3-0.6B, the shape of Llama 3 8B and a billion parameters with 64 experts, in bfloat16, with rows of
4096 tokens. A step is forward, backward, gradient norm, clipping and AdamW. Data-parallel ranks have as many rows as
the single GPU; tensor-parallel ranks share their rows. Ideal scaling keeps the single GPU's tokens per second on every
GPU. The peer is Hugging Face transformers, with Liger's kernels if installed, under torch's `fully_shard` with one unit
per layer, as here. Experts are drawn at random, so that all ranks get even shares, as with a balanced router. A line
reports tokens per second and GPU, their ratio to one GPU, and peak GiB per GPU.

`ONLY=--finetuning` measures fine-tuning on one GPU, `ONLY=--capture` CUDA graphs on one GPU, and `ONLY=--wide RANKS=8`
the meshes of a whole host, with Qwen3-8B's shape at a million tokens and Qwen3-30B-A3B.
"""

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import attrs  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from benchmarks.gpu.pipeline import _batch, _initialise  # noqa: E402
from benchmarks.gpu.training import DENSE, SMALL, SPARSE  # noqa: E402
from drawloom.components.adapters.lora import Lora  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.precision import DtypePolicy  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.distributed.sum_over_shards import SumOverParameters  # noqa: E402
from drawloom.components.experts.all_to_all import AllToAllExperts  # noqa: E402
from drawloom.components.experts.symmetric import SymmetricExperts  # noqa: E402
from drawloom.components.float8.training import Float8Training  # noqa: E402
from drawloom.components.frozen_weights.quantized import QuantizedWeights  # noqa: E402
from drawloom.components.gradients.clip_norm import ClipNorm  # noqa: E402
from drawloom.components.gradients.synchronize import Synchronize  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.loss.next_token import NextToken  # noqa: E402
from drawloom.components.model.decoder.experts import Router  # noqa: E402
from drawloom.components.model.qwen3.dense import Qwen3Dense  # noqa: E402
from drawloom.components.model.qwen3.moe import Qwen3Moe  # noqa: E402
from drawloom.components.optim.adamw import AdamW  # noqa: E402
from drawloom.components.optim.stochastic_adamw import StochasticAdamW  # noqa: E402
from drawloom.components.pipeline.captured import CapturedPasses  # noqa: E402
from drawloom.components.pipeline.executor import ProgramExecutor  # noqa: E402
from drawloom.components.ports.pipeline import create_step_state  # noqa: E402
from drawloom.components.ports.run import Step  # noqa: E402
from drawloom.components.ports.stages import Recompute  # noqa: E402
from drawloom.components.stages.materialized import MaterializedStages  # noqa: E402
from support import pipelines  # noqa: E402

LENGTH = 12 if TINY else 4096

LLAMA: dict[str, Any] = DENSE | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
}
"""The shape of Llama 3 8B, with Qwen3's norms of queries and keys."""

QWEN: dict[str, Any] = LLAMA | {"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
"""Qwen3-8B."""

QWEN_EXPERTS: dict[str, Any] = SPARSE | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B."""


@attrs.frozen
class Case:
    """Model, rows per microbatch, microbatches per rank and step, mesh, and whether the peer runs."""

    model: str
    rows: int
    microbatches: int
    sizes: Mapping[str, int] = {}
    peer: bool = False
    reshard: bool = True
    schedule: str = "one_f_one_b"
    length: int = LENGTH
    lora: bool = False
    capture: bool = False
    recompute: Recompute = "none"
    dispatcher: str = "all_to_all"
    layers: int | None = None
    float8: bool = False
    frozen: Any = "compute"  # or the name of a quantized format
    stochastic: Mapping[str, Any] | None = None  # options of the optimizer with stochastic rounding, instead of AdamW

    @property
    def name(self) -> str:
        """Return the name in a printed line."""
        who = ", LoRA" if self.lora else ", CUDA graphs" if self.capture else ""
        peer = ", FSDP2 + transformers" if self.sizes else ", peft + transformers" if self.lora else ", transformers"
        who += peer if self.peer else "" if self.reshard else ", gathered once a step"
        mesh = " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "one GPU"
        by = f", {self.schedule}" if "pipeline" in self.sizes or self.schedule != "one_f_one_b" else ""
        who += f", {self.dispatcher}" if self.dispatcher != "all_to_all" else ""
        who += f", {self.layers} layers" if self.layers else ""
        who += ", float8" if self.float8 else ""
        who += f", frozen weights in {self.frozen}" if self.frozen != "compute" else ""
        who += "".join(f", {value}" for value in (self.stochastic or {}).values())
        who += f", recompute {self.recompute}" if self.recompute != "none" else ""
        return f"{self.model}, {self.rows} x {self.length} x {self.microbatches}, {mesh}{by}{who}"

    @property
    def tokens(self) -> float:
        """Return the tokens per step and GPU."""
        apart = math.prod(size for name, size in self.sizes.items() if name in ("pipeline", "context", "tensor"))
        return self.rows * self.microbatches * self.length / apart


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16

MEDIUM: dict[str, Any] = DENSE | {"hidden_size": 2048, "intermediate_size": 6144}
"""Qwen3-1.7B."""

SMALL_MODEL, LARGE, EXPERTS = "Qwen3-0.6B", "Llama-3-8B shape", "1B with 64 experts"
MEDIUM_MODEL = "Qwen3-1.7B"
QWEN_8B, QWEN_30B = "Qwen3-8B", "Qwen3-30B-A3B"
MODELS = {
    SMALL_MODEL: DENSE,
    MEDIUM_MODEL: MEDIUM,
    LARGE: LLAMA,
    EXPERTS: SPARSE,
    QWEN_8B: QWEN,
    QWEN_30B: QWEN_EXPERTS,
}
SHAPES = ((SMALL_MODEL, 4, 1), (SMALL_MODEL, 4, 4), (LARGE, 2, 1))
OF_EXPERTS = ((EXPERTS, 4, 1), (EXPERTS, 4, 4))


def cases(ranks: int) -> list[Case]:
    """Return the cases for a number of processes."""
    if ranks == 1:
        return [*(Case(*shape) for shape in (*SHAPES, *OF_EXPERTS)), _long_row(int(os.environ.get("RANKS", "2")), {})]
    # A replica of the large model would need more memory than one GPU has, for gradient buckets.
    selected = [Case(*shape, {"data_replicate": ranks}) for shape in SHAPES[:2]]
    for shape in SHAPES:
        selected += [Case(*shape, {"data_shard": ranks}, reshard=reshard) for reshard in (True, False)]
        selected += [Case(*shape, {"data_shard": ranks}, peer=True)] if shape[2] == 1 else []
    for shape in OF_EXPERTS:
        shards = {"data_shard": ranks}
        selected += [Case(*shape, {**shards, "expert": ranks}, reshard=reshard) for reshard in (True, False)]
        selected += [Case(*shape, {**shards, "expert": ranks}, reshard=False, dispatcher=name) for name in SYMMETRIC]
        selected.append(Case(*shape, shards, reshard=False))
    selected += [
        Case(
            *OF_EXPERTS[1],
            {"data_shard": ranks, "expert": ranks},
            reshard=False,
            dispatcher=dispatcher,
            schedule="dual_pipe_v",
        )
        for dispatcher in ("all_to_all", "symmetric, capacity 1.25")
    ]
    selected.append(Case(LARGE, 2 * ranks, 1, {"tensor": ranks}))
    selected.append(_long_row(ranks, {"context": ranks}))
    pipelined = [Case(LARGE, 1, 8 * ranks // 2, {"pipeline": ranks}, schedule=name) for name in SCHEDULES]
    if ranks == 2:
        return [*selected, *pipelined]
    half = {"data_shard": ranks // 2}
    selected += [Case(LARGE, 4, 1, {"tensor": 2, **half}), Case(*SHAPES[0], {"data_replicate": 2, **half})]
    return [*selected, *pipelined, Case(LARGE, 1, 8, {"pipeline": ranks // 2, "data_shard": 2}, reshard=False)]


def _long_row(ranks: int, sizes: Mapping[str, int]) -> Case:
    """Return the case of a single long row that `ranks` ranks can share."""
    return Case(SMALL_MODEL, 1, 1, sizes, length=ranks * 4 * LENGTH)


SCHEDULES = ("one_f_one_b", "zero_bubble_v")
SYMMETRIC: dict[str, dict[str, Any]] = {"symmetric": {}, "symmetric, capacity 1.25": {"capacity": 1.25}}

FINETUNING = [
    Case(*shape, peer=peer, length=length, lora=lora)
    for shape, length, lora in (
        ((LARGE, 1, 1), LENGTH, True),
        ((LARGE, 2, 1), LENGTH, True),
        ((SMALL_MODEL, 1, 1), 2 * LENGTH, False),
        ((SMALL_MODEL, 2, 1), 2 * LENGTH, False),
    )
    for peer in (False, True)
]
"""Cases of `--finetuning` on one GPU: LoRA on all linear layers of a block, and all weights of the small model."""

CAPTURE = [
    Case(*shape, capture=capture)
    for shape in ((SMALL_MODEL, 4, 4), (SMALL_MODEL, 1, 16), (EXPERTS, 4, 1), (EXPERTS, 1, 4), (LARGE, 2, 1))
    for capture in (False, True)
]
"""Cases of `--capture` on one GPU: with and without CUDA graphs."""
ALONE = {"--finetuning": FINETUNING, "--capture": CAPTURE}


MILLION = 32 if TINY else 2**20


def wide(ranks: int) -> list[Case]:
    """Return the cases of `--wide` on a whole host, or the same shapes on one GPU, one with fewer layers."""
    long: Any = {"length": 2 * LENGTH}
    if ranks == 1:
        shapes = [Case(LARGE, 1, 1, **long), Case(LARGE, 2, 1), Case(EXPERTS, 4, 1), Case(EXPERTS, 4, 4)]
        return [*shapes, Case(QWEN_30B, 2, 1, layers=12)]
    shards = {"data_shard": ranks}
    selected = [Case(LARGE, 1, 1, shards, reshard=reshard, **long) for reshard in (True, False)]
    mesh = {"pipeline": ranks // 2, "data_shard": 2}
    selected += [Case(LARGE, 1, 2 * ranks, mesh, schedule=name, **long) for name in WIDE_SCHEDULES]
    selected += [Case(QWEN_30B, 2, 1, {**shards, "expert": ranks}, reshard=reshard) for reshard in (True, False)]
    selected += [Case(*shape, {**shards, "expert": ranks}, reshard=False) for shape in OF_EXPERTS]
    selected.append(Case(LARGE, 2 * ranks, 1, {"tensor": ranks}))
    selected.append(Case(QWEN_8B, 1, 1, {"context": ranks}, length=MILLION, lora=True, recompute="blocks"))
    return selected


WIDE_SCHEDULES = ("one_f_one_b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v", "auto")


def main() -> None:
    """Measure one GPU, then several, in separate processes."""
    if "RANK" in os.environ:
        return _worker()
    several = int(os.environ.get("RANKS", "2"))
    alone = any(flag in sys.argv for flag in ALONE)
    if not TINY and not alone and torch.cuda.device_count() < several:
        sys.exit(f"this needs {several} GPUs; --tiny tries it with processes on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "4"}
        for ranks in (1,) if alone else (1, several):
            starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command = [sys.executable, *starter, str(Path(__file__)), *sys.argv[1:]]
            subprocess.run(command, env=environment, check=True)


def _worker() -> None:
    kind: Any = "cpu" if TINY else "cuda"
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    base = Path(os.environ["BENCH_FOLDER"]) / "one.json"
    ones: dict[str, float] = json.loads(base.read_text()) if base.exists() else {}
    several = wide if "--wide" in sys.argv else cases
    chosen_cases = next((flag_cases for flag, flag_cases in ALONE.items() if flag in sys.argv), None) or several(
        processes.world_size
    )
    try:
        for case in chosen_cases:
            if not words or any(word in case.name for word in words):
                _line(case, processes, device, ones)
        base.write_text(json.dumps(ones))
    finally:
        processes.close()


def _line(case: Case, processes: TorchProcesses, device: ComputeDevice, ones: dict[str, float]) -> None:
    mesh = RankMesh(processes=processes, **{"data_replicate": 1, **case.sizes})
    mesh.open()
    shape = f"{case.model} {case.rows} {case.microbatches} {case.length}"
    try:
        cost = clock.step_cost((_peer if case.peer else our_step)(case, mesh, device), device.device)
        speed = case.tokens / cost.seconds
        # CUDA graphs reserve their memory even while they do not run.
        memory = cost.reserved if "--capture" in sys.argv else cost.allocated
        if processes.world_size == 1 and not case.capture:
            ones[shape] = speed
            if case.length == LENGTH:
                ones[case.model] = speed  # the last shape of a model is the fastest
        base = ones.get(shape, ones.get(case.model, float("nan")))
        text = f"{speed:>10,.0f} tokens/s a GPU{speed / base:>8.1%}{memory:>8.1f} GiB"
    except Exception as failure:  # the next case runs; all ranks fail alike
        text = f"  {type(failure).__name__}: {failure}".splitlines()[0][:150]
    if processes.rank == 0:
        print(f"{case.name:<75}{text}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def _random_experts(router: Router, scores: Tensor) -> Tensor:
    """Choose experts at random instead of by scores (..., experts): an untrained router gives ranks uneven shares."""
    return torch.rand_like(scores).topk(router.spec.num_experts_per_tok).indices


def our_step(case: Case, mesh: RankMesh, device: ComputeDevice) -> Callable[[], None]:
    Router.choose_experts = _random_experts  # type: ignore[assignment,method-assign]
    kernels = AutoKernels(device=device)
    kernels.open()
    config = _config(case) | {"max_position_embeddings": 40960}
    kind = Qwen3Moe if config.pop("model_type") == "qwen3_moe" else Qwen3Dense
    model: Any = kind(kernels=kernels, **config)
    model.initialize_parameter = _initialise
    is_wide = TINY and not case.float8 and case.frozen == "compute" and case.stochastic is None
    dtype: Any = "float32" if is_wide else "bfloat16"
    cut_blocks = ("*.down_proj*",) if TINY and case.frozen != "compute" else ()
    features: list[Any] = [Float8Training(device=device)] if case.float8 else []
    if case.frozen != "compute":
        features.append(QuantizedWeights(format=case.frozen, exclude=cut_blocks))
    captured: list[Any] = [CapturedPasses(device=device)] * case.capture
    schedule, loss = pipelines.schedule(case.schedule), NextToken()
    common: dict[str, Any] = {"mesh": mesh, "device": device, "schedule": schedule}
    targets = TARGETS if kind is Qwen3Dense else TARGETS[:4]  # experts have no linear layers
    lora: list[Any] = [Lora(targets=list(targets), rank=RANK, alpha=2.0 * RANK)] if case.lora else []
    stages = MaterializedStages(
        model=model,
        loss=loss,
        precision=DtypePolicy(parameter=dtype),
        job=pipelines.Job(),
        adapters=lora,
        features=[*features, *captured],
        **common,
    )
    use: Any = SymmetricExperts if case.dispatcher in SYMMETRIC else AllToAllExperts
    stages.dispatcher = use(kernels=kernels, mesh=mesh, **SYMMETRIC.get(case.dispatcher, {}))
    stages.reshard_after_forward, stages.recompute = case.reshard, case.recompute
    stages.open()
    edges: dict[str, Any] = {"stages": stages, "objective": loss}
    executor = ProgramExecutor(**edges, features=captured, **common)
    executor.open()
    phases: list[Any] = [
        Synchronize(parameters=stages, mesh=mesh, reduce=SumOverParameters(mesh=mesh)),
        ClipNorm(parameters=stages, max_norm=1.0),
        optimizer := _optimizer(case, stages, mesh, device),
    ]
    optimizer.open()
    size = config["vocab_size"], case.rows, case.length
    host = ComputeDevice(kind="cpu")  # a run's batches start on the CPU
    batches = [_batch(number, host, *size) for number in range(case.microbatches)]

    def take_step() -> None:
        step = Step(1, 1, create_step_state(batches))
        executor.run_forward_and_backward(step.state)
        for phase in phases:
            phase.run_phase(step)

    return take_step


def _optimizer(case: Case, stages: Any, mesh: RankMesh, device: ComputeDevice) -> Any:
    if case.stochastic is None:
        return AdamW(parameters=stages, mesh=mesh, lr=1e-5)
    job: Any = pipelines.Job()
    return StochasticAdamW(parameters=stages, mesh=mesh, job=job, device=device, lr=1e-5, **case.stochastic)


def _peer(case: Case, mesh: RankMesh, device: ComputeDevice) -> Callable[[], None]:
    import transformers
    from torch.distributed.fsdp import fully_shard

    config = transformers.AutoConfig.for_model(**_config(case))
    kinds: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = kinds.from_config(config, attn_implementation="sdpa").to(torch.float32 if TINY else torch.bfloat16)
    liger = find_spec("liger_kernel") is not None and not TINY
    if liger:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    if case.lora:
        peft: Any = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    if case.sizes:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh.create_torch_mesh(["data_shard"]))
        fully_shard(model, mesh=mesh.create_torch_mesh(["data_shard"]))
    model.to_empty(device=device.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                half = torch.arange(len(buffer), device=device.device) / len(buffer)
                buffer.copy_(config.rope_parameters["rope_theta"] ** -half)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = _batch(0, device, config.vocab_size, case.rows, case.length).tokens

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _config(case: Case) -> dict[str, Any]:
    small = {key: value for key, value in SMALL.items() if key in MODELS[case.model]}
    small |= {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    layers = {"num_hidden_layers": case.layers} if case.layers else {}
    return MODELS[case.model] | layers | (small if TINY else {})


if __name__ == "__main__":
    main()
