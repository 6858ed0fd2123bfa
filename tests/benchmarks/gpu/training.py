"""
One training step of whole models, compared with Hugging Face transformers, in one run: `make bench NAME=training`.

Every contender gets the same tokens, the same weight shapes in bfloat16, and an AdamW step. Tokens per second are from
the median of consecutive steps: the host issues a step while the GPU computes the step before. MFU is

    tokens/s * FLOPs of a token / rate

with the FLOPs from `metrics.utilization` (`components/ports/model.py`): 3 * (2 * P + A). P counts the parameters that
multiply a token (visited experts and the head, but not the embedding), A has the products of causal attention inside
windows and of the gated delta rule, and the factor 3 counts forward once and backward twice. `rate` is the measured
speed of a bfloat16 product of 8192 x 8192. Nothing is recomputed. With `--operations` every line is followed by the
step's longest GPU operations.

transformers computes the gated delta rule by flash-linear-attention if `PEERS` has it, else in plain torch. With Triton
3.4 to 3.7.0 on Hopper, flash-linear-attention returns wrong gradients, and only its time counts.
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

from benchmarks.gpu import clock, peers  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.ports.data import count_visible_keys  # noqa: E402
from drawloom.components.ports.model import Head, LayerRange, TokenContext  # noqa: E402
from drawloom.kernels.adamw.eager import ParamState, compute_step_scalars  # noqa: E402

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
"""A billion parameters; a token visits a quarter."""

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Qwen3.5-4B with 8 of its 32 layers: 6 gated delta nets, 2 layers with attention."""

OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
"""gpt-oss-20b with 4 of its 24 layers: 2 have a window."""

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

MODELS = {
    "Qwen3-0.6B": DENSE,
    "1B with experts": SPARSE,
    "Qwen3.5-4B, 8 layers": HYBRID,
    "gpt-oss-20b, 4 layers": OSS,
}
OURS = {
    "qwen3": ("qwen3.dense", "Qwen3Dense"),
    "qwen3_moe": ("qwen3.moe", "Qwen3Moe"),
    "qwen3_5_text": ("qwen3_5", "Qwen35"),
    "gpt_oss": ("gpt_oss", "GptOss"),
}

ATTENTION = {"gpt_oss": "eager" if TINY else "flex_attention"}
"""transformers' attention, if it isn't torch's `sdpa`, which has no sinks; flex has no gradients on a CPU."""


def main() -> None:
    """Print a line per model and contender."""
    if DEVICE.type != "cuda" and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    rate = clock.matmul_rate(64 if TINY else 8192)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}, {rate / 1e12:.1f} TFLOP/s")
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    for name, config in MODELS.items():
        config = config | ({key: size for key, size in SMALL.items() if key in config} if TINY else {})
        rows, length = (2, 12) if TINY else (4, 4096)
        chosen = [
            (contender, make)
            for contender, make in contenders(config)
            if not wanted or any(word in f"{name}, {contender}" for word in wanted)
        ]
        if not chosen:
            continue
        title = f"{name}, {rows} rows of {length}"
        print(f"\n{title:<46}{'tokens/s':>16}{'MFU':>10}{'GiB':>10}")
        for contender, make in chosen:
            try:
                line = _measure(make(config, *_tokens(config, rows, length)), rows * length, config, length, rate)
            except Exception as failure:  # the failure is reported, and the next contender runs
                line = f"  {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:100]
            print(f"  {contender:<46}{line}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


def contenders(config: dict[str, Any]) -> Iterator[tuple[str, Callable[[dict[str, Any], Tensor, Tensor], Step]]]:
    """Yield the installed contenders: name and training step factory."""
    yield "drawloom", _make_our_step
    yield "drawloom, stochastic rounding", partial(_make_our_step, rounded=True)
    yield "transformers", _make_transformers_step
    if find_spec("liger_kernel") is None:
        print("  liger_kernel is not installed and is skipped: pip install liger-kernel==0.8.5")
    else:
        yield "transformers, Liger", partial(_make_transformers_step, liger=True)
    yield "drawloom, compiled", partial(_make_our_step, compiled=True)
    yield "transformers, compiled", partial(_make_transformers_step, compiled=True)


def _tokens(config: dict[str, Any], rows: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(config["vocab_size"], (rows, length + 1), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _make_our_step(
    config: dict[str, Any], tokens: Tensor, targets: Tensor, compiled: bool = False, rounded: bool = False
) -> Step:
    kind: Any = DEVICE.type
    device: Any = ComputeDevice(kind=kind)
    kernels = AutoKernels(device=device)
    kernels.open()
    blueprint = _blueprint(config, kernels)
    with torch.device("meta"):
        built: nn.Module = blueprint.build(LayerRange.of_whole_model(blueprint.num_hidden_layers))
    model = built.bfloat16().to_empty(device=DEVICE)
    _fill(model)
    rows, length = tokens.shape
    positions = torch.arange(length, device=DEVICE).expand(rows, length)
    weights = torch.ones(targets.shape, device=DEVICE)
    shared = TokenContext(positions, torch.zeros_like(positions), weights, one_document_per_row=True)
    compiled_model: Any = torch.compile(model) if compiled else model

    def losses(hidden: Tensor, head: Head) -> Tensor:
        return head.token_losses(hidden, targets, shared.weights)[0]

    return _step(model, lambda: compiled_model(tokens, shared, losses).sum() / targets.numel(), rounded)


def _make_transformers_step(
    config: dict[str, Any], tokens: Tensor, targets: Tensor, compiled: bool = False, liger: bool = False
) -> Step:
    peers.allow_fla_backward()
    model_config = transformers.AutoConfig.for_model(**config)
    with DEVICE:
        kinds: Any = transformers.AutoModelForCausalLM
        attention = ATTENTION.get(config["model_type"], "sdpa")
        model: Any = kinds.from_config(model_config, attn_implementation=attention).bfloat16()
    if liger:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    compiled_model: Any = torch.compile(model) if compiled else model

    def loss() -> Tensor:
        if liger:
            return compiled_model(tokens, labels=tokens).loss  # type: ignore[no-any-return]
        return F.cross_entropy(compiled_model(tokens).logits.float().flatten(0, 1), targets.flatten())

    return _step(model, loss, False)


def _blueprint(config: dict[str, Any], kernels: AutoKernels | None) -> Any:
    """Return drawloom's model for a config. Without kernels the model can be built, but not run."""
    module, name = OURS[config["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_whole_config(config)), "utf-8")
        model = getattr(import_module(f"drawloom.components.model.{module}"), name)(kernels=kernels, config=path)
        _ = model.architecture  # read while the file is there
    return model


def _whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return all keys of the model's `config.json`."""
    whole: dict[str, Any] = transformers.AutoConfig.for_model(**config).to_dict()
    return whole


def _fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, 0.0, 0.02)


def _step(model: nn.Module, loss: Callable[[], Tensor], rounded: bool) -> Step:
    parameters = list(model.parameters())
    if rounded:
        apply = _stochastic_adamw(parameters)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        apply = optimizer.step

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        apply()
        for parameter in parameters:
            parameter.grad = None

    return step


def _stochastic_adamw(parameters: list[nn.Parameter]) -> Callable[[], None]:
    module = "adamw.triton.AdamwTriton" if DEVICE.type == "cuda" else "adamw.eager.AdamwEager"
    path, _, name = f"drawloom.kernels.{module}".rpartition(".")
    weights = [parameter.detach() for parameter in parameters]
    kept = [ParamState(w, torch.zeros_like(w), torch.zeros_like(w), 0.1, number) for number, w in enumerate(weights)]
    stepper = getattr(import_module(path), name)(kept)
    count = 0

    def apply() -> None:
        nonlocal count
        count += 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        stepper.step(gradients, compute_step_scalars(1e-4, (0.9, 0.95), 1e-8, count), count)

    return apply


def _measure(step: Step, tokens: int, config: dict[str, Any], length: int, rate: float) -> str:
    cost = clock.step_cost(step, DEVICE)
    speed = tokens / cost.seconds
    line = f"{speed:>14,.0f}{speed * _flops_per_token(config, length) / rate:>10.1%}{cost.allocated:>10.1f}"
    return "\n    ".join([line, *_list_operations(step)])


def _list_operations(step: Step) -> Iterator[str]:
    """Yield lines about a step's GPU operations, if they were requested."""
    if "--operations" in sys.argv and DEVICE.type == "cuda":
        breakdown = import_module("benchmarks.gpu.breakdown")  # it imports this module
        yield from breakdown.describe_operations(list(breakdown.traced_operations(step)))


def _flops_per_token(config: dict[str, Any], length: int) -> float:
    """Return the matrix FLOPs per token of a step, by the module's formula."""
    flops = _blueprint(config, None).forward_flops()
    row = torch.zeros(1, length, dtype=torch.int64)
    return float(
        flops.count_training_flops(
            1,
            {
                window: int(count_visible_keys(row).clamp(max=window or length).sum()) / length
                for window in flops.per_pair
            },
        )
    )


if __name__ == "__main__":
    main()
