"""
One training step of whole models, beside Hugging Face transformers, in one run: `make bench-train-gpu`.

Every contender gets the same tokens, the same random weights' shapes in bfloat16, and an AdamW step. Tokens a second
are the median of several steps, which follow each other as in a run: the host issues one while the GPU computes the one
before. MFU is

    tokens/s * FLOPs of a token / rate

with the FLOPs that `metrics.utilization` counts (`components/ports/flops.py`): 3 * (2 * P + 2 * layers * heads *
head_dim * (length + 1)), where P are the parameters that a token is multiplied with (of experts, those it visits; of
the embedding, the head alone), the second term is causal attention, and 3 counts forward once and backward twice.
`rate` is what a bfloat16 product of 8192 x 8192 reaches here. Nothing is recomputed.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.ports.model import Head, LayerRange, TokenContext  # noqa: E402
from drawloom.kernels.adamw import ParamState, step_scalars  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step = Callable[[], object]

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
"""Qwen3-0.6B."""

SPARSE: dict[str, Any] = DENSE | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 12,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
"""A billion parameters, of which a token visits a quarter."""

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

MODELS = {"Qwen3-0.6B": DENSE, "1B with experts": SPARSE}
OURS = {"qwen3": ("dense", "Qwen3Dense"), "qwen3_moe": ("moe", "Qwen3Moe")}


def main() -> None:
    """Print a line for each contender of each model."""
    if DEVICE.type != "cuda" and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    rate = clock.matmul_rate(64 if TINY else 8192)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}, {rate / 1e12:.1f} TFLOP/s")
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    for name, config in MODELS.items():
        config = config | (SMALL if TINY else {})
        rows, length = (2, 12) if TINY else (4, 4096)
        print(f"\n{name}, {rows} rows of {length}{'':<20}{'tokens/s':>12}{'MFU':>10}{'GiB':>10}")
        for contender, make in contenders(config):
            if wanted and not any(word in f"{name}, {contender}" for word in wanted):
                continue
            try:
                line = _measured(make(config, *_tokens(config, rows, length)), rows * length, config, length, rate)
            except Exception as failure:  # one that does not run here is said so, and the others go on
                line = f"  {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:100]
            print(f"  {contender:<46}{line}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def contenders(config: dict[str, Any]) -> Iterator[tuple[str, Callable[[dict[str, Any], Tensor, Tensor], Step]]]:
    """Names, and what makes a step of each; who is not here is said so."""
    yield "drawloom", _ours
    yield "drawloom, compiled", partial(_ours, compiled=True)
    yield "drawloom, stochastic rounding", partial(_ours, rounded=True)
    yield "transformers", _theirs
    yield "transformers, compiled", partial(_theirs, compiled=True)
    if find_spec("liger_kernel") is None:
        print("  liger_kernel is absent, and left out: pip install liger-kernel==0.8.5")
    else:
        yield "transformers, Liger", partial(_theirs, liger=True)


def _tokens(config: dict[str, Any], rows: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(config["vocab_size"], (rows, length + 1), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _ours(
    config: dict[str, Any], tokens: Tensor, targets: Tensor, compiled: bool = False, rounded: bool = False
) -> Step:
    kind: Any = DEVICE.type
    device: Any = ComputeDevice(kind=kind)
    kernels = AutoKernels(device=device)
    kernels.open()
    blueprint = _blueprint(config, kernels)
    with torch.device("meta"):
        built: nn.Module = blueprint.build(LayerRange(0, blueprint.num_hidden_layers, True, True))
    model = built.bfloat16().to_empty(device=DEVICE)
    _fill(model)
    rows, length = tokens.shape
    positions = torch.arange(length, device=DEVICE).expand(rows, length)
    weights = torch.ones(targets.shape, device=DEVICE)
    shared = TokenContext(positions, torch.zeros_like(positions), weights, whole_rows=True)
    called: Any = torch.compile(model) if compiled else model

    def losses(hidden: Tensor, head: Head) -> Tensor:
        return head.token_losses(hidden, targets, shared.weights)[0]

    return _step(model, lambda: called(tokens, shared, losses).sum() / targets.numel(), rounded)


def _theirs(
    config: dict[str, Any], tokens: Tensor, targets: Tensor, compiled: bool = False, liger: bool = False
) -> Step:
    made = transformers.AutoConfig.for_model(**config)
    with DEVICE:
        kinds: Any = transformers.AutoModelForCausalLM
        model: Any = kinds.from_config(made, attn_implementation="sdpa").bfloat16()
    if liger:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    called: Any = torch.compile(model) if compiled else model

    def loss() -> Tensor:
        if liger:
            return called(tokens, labels=tokens).loss  # type: ignore[no-any-return]
        return F.cross_entropy(called(tokens).logits.float().flatten(0, 1), targets.flatten())

    return _step(model, loss, False)


def _blueprint(config: dict[str, Any], kernels: AutoKernels | None) -> Any:
    """drawloom's model of a config; without kernels it can be built, and not be run."""
    module, name = OURS[config["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_whole_config(config)), "utf-8")
        made = getattr(import_module(f"drawloom.components.model.qwen3.{module}"), name)(kernels=kernels, config=path)
        _ = made.architecture  # read while the file is there
    return made


def _whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """As `config.json` has it."""
    whole: dict[str, Any] = transformers.AutoConfig.for_model(**config).to_dict()
    return whole


def _fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, 0.0, 0.02)


def _step(model: nn.Module, loss: Callable[[], Tensor], rounded: bool) -> Step:
    parameters = list(model.parameters())
    if rounded:
        apply = _rounded(parameters)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        apply = optimizer.step

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        apply()
        for parameter in parameters:
            parameter.grad = None

    return step


def _rounded(parameters: list[nn.Parameter]) -> Callable[[], None]:
    module = "triton.adamw.AdamwTriton" if DEVICE.type == "cuda" else "adamw.AdamwEager"
    path, _, name = f"drawloom.kernels.{module}".rpartition(".")
    weights = [parameter.detach() for parameter in parameters]
    kept = [ParamState(w, torch.zeros_like(w), torch.zeros_like(w), 0.1, number) for number, w in enumerate(weights)]
    stepper = getattr(import_module(path), name)(kept)
    count = 0

    def apply() -> None:
        nonlocal count
        count += 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        stepper.step(gradients, step_scalars(1e-4, (0.9, 0.95), 1e-8, count), count)

    return apply


def _measured(step: Step, tokens: int, config: dict[str, Any], length: int, rate: float) -> str:
    cost = clock.step_cost(step, DEVICE)
    a_second = tokens / cost.seconds
    return f"{a_second:>14,.0f}{a_second * _operations(config, length) / rate:>10.1%}{cost.allocated:>10.1f}"


def _operations(config: dict[str, Any], length: int) -> float:
    """Of the matrix units, for each token of a step: see the top."""
    flops = _blueprint(config, None).forward_flops()
    return float(flops.of_training(1, {None: (length + 1) / 2}))


if __name__ == "__main__":
    main()
