"""
torchtitan compared with drawloom on one GPU, in one run: `make bench NAME=titan`.

torchtitan's part is its Qwen3 model, its compilation per block, its loss, clipping and fused AdamW; drawloom's part is
the step of a run, as `meshes.py` takes it. Both have bfloat16 weights and the same shapes. torchtitan's Trainer needs a
data set, a tokenizer and packages for both; this step needs torchtitan alone, because modules that only load data are
replaced. Float8 is torchao's, as torchtitan converts it: rowwise scales for all linear layers but the head.
"""

import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

TITAN = find_spec("torchtitan")
INSTALL = "pip install --no-deps torchtitan==0.2.2, for float8 also torchao"


def main() -> None:
    """Start one process, which prints a line per model and contender."""
    if "RANK" in os.environ:
        return _worker()
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    subprocess.run([*starter, __file__, *sys.argv[1:]], env=os.environ | {"OMP_NUM_THREADS": "4"}, check=True)


def _worker() -> None:
    from benchmarks.gpu import clock, meshes
    from drawloom.components.distributed.device import ComputeDevice
    from drawloom.components.distributed.mesh import RankMesh
    from drawloom.components.distributed.processes import TorchProcesses

    device = ComputeDevice(kind="cpu" if meshes.TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, data_replicate=1)
    mesh.open()
    has_room = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 100e9
    layers = None if has_room else 8
    print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", flush=True)
    try:
        for case in (meshes.Case(meshes.SMALL_MODEL, 4, 1), meshes.Case(meshes.LARGE, 2, 1, layers=layers)):
            config, base = meshes._config(case), float("nan")
            ids = torch.randint(config["vocab_size"], (case.rows, case.length + 1), device=device.device)
            pair = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            contenders: dict[str, Callable[[], Callable[[], None]]] = {
                "torchtitan, compiled": partial(make_step, config, *pair),
                "torchtitan, compiled, float8": partial(make_step, config, *pair, float8=True),
                "drawloom": partial(meshes.our_step, case, mesh, device),
            }
            for name, make in contenders.items():
                if name != "drawloom" and not is_installed("float8" in name):
                    print(f"{case.name}, {name}: not installed ({INSTALL})", flush=True)
                    continue
                cost = clock.step_cost(make(), device.device)
                speed = case.tokens / cost.seconds
                base = speed if math.isnan(base) else base
                numbers = f"{speed:>10,.0f} tokens/s{speed / base:>8.3f}{cost.allocated:>8.1f} GiB"
                print(f"{case.name + ', ' + name:<80}{numbers}", flush=True)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    finally:
        processes.close()


def is_installed(float8: bool = False) -> bool:
    """Return whether the step's packages are installed."""
    return TITAN is not None and (not float8 or find_spec("torchao") is not None)


def make_step(config: dict[str, Any], tokens: Tensor, targets: Tensor, float8: bool = False) -> Callable[[], None]:
    """
    Return one training step: forward, backward, clipping to norm 1 and AdamW, with bfloat16 weights.

    `config` has the keys of a dense Qwen3's `config.json` from Hugging Face; `tokens` and `targets` have shape (rows,
    length), int64.
    """
    _skip_data_packages()
    model = _model(config, tokens)
    if float8:
        _convert_to_float8(model)
    apply_compile = import_module("torchtitan.models.llama4.infra.parallelize").apply_compile
    apply_compile(model, SimpleNamespace(backend="inductor"), False)
    losses = import_module("torchtitan.components.loss")
    loss = torch.compile(losses.cross_entropy_loss)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        (loss(model(tokens), targets) / targets.numel()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


class AbsentModule(ModuleType):
    """A replacement for a data loading package: every attribute is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _skip_data_packages() -> None:
    # torchtitan's packages import data sets, tokenizers and a command line; the modules in them that train do not.
    assert TITAN is not None and TITAN.submodule_search_locations is not None
    root = Path(TITAN.submodule_search_locations[0])
    for name in ("", ".models.qwen3", ".models.llama3", ".models.llama4"):
        package = ModuleType(f"torchtitan{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules.setdefault(package.__name__, package)
    for name in SKIPPED:
        sys.modules.setdefault(name, AbsentModule(name))


SKIPPED = (
    "torchtitan.config.manager",
    "torchtitan.components.dataloader",
    "torchtitan.components.tokenizer",
    "torchtitan.components.validate",
    "torchtitan.components.metrics",
)


def _model(config: dict[str, Any], tokens: Tensor) -> nn.Module:
    arguments = import_module("torchtitan.models.qwen3.model.args").Qwen3ModelArgs(
        vocab_size=config["vocab_size"],
        max_seq_len=tokens.shape[1],
        head_dim=config["head_dim"],
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        hidden_dim=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        enable_weight_tying=config["tie_word_embeddings"],
    )
    with torch.device("meta"):
        model: Any = import_module("torchtitan.models.qwen3.model.model").Qwen3Model(arguments).bfloat16()
    model.to_empty(device=tokens.device)
    with torch.no_grad():
        model.init_weights(buffer_device=tokens.device)
    module: nn.Module = model.train()
    return module


def _convert_to_float8(model: nn.Module) -> None:
    float8 = import_module("torchao.float8")
    rowwise = float8.Float8LinearConfig.from_recipe_name("rowwise")
    # Without it, casts to float8 are of values that were never rounded to bfloat16: torchtitan sets it too.
    inductor: Any = import_module("torch._inductor.config")
    inductor.emulate_precision_casts = True
    float8.convert_to_float8_training(
        model, config=rowwise, module_filter_fn=lambda _, name: not name.endswith("output")
    )


if __name__ == "__main__":
    main()
