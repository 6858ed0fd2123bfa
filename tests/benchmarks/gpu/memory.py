"""
Plans of recipes that use host memory or quantized weights, compared with runs on one GPU: `make bench-memory-gpu`.

Each case is a short run of a shipped recipe at its real widths, from random weights, on packed source code. A line
reports the last step's loss, tokens per second and MFU, planned and measured peak memory, and planned and measured
seconds of a step. Words on the command line choose the cases whose names have them; `--tiny` runs all cases with small
sizes on a CPU.
"""

import sys
import tempfile
import time
from pathlib import Path

import attrs

from benchmarks.gpu.shelf import prepare_data, train_recipe

TINY = "--tiny" in sys.argv
STEPS = 2 if TINY else 6

LIMITS = ("memory.limit=78.1e9", "memory.host_limit=115e9")
"""The default limits for a GPU of 80 GB and a host of 128 GiB, also where the machine has more."""

ONE_GPU = ("mesh.data_shard=1", "stages.sync_each_microbatch=false", "vars.length=4096")

WITHOUT_MASTERS = (
    *("precision.parameter=bfloat16", "precision.gradient=bfloat16", "precision.uncast=[]"),
    *("optimizer.use=optim.stochastic_adamw", "optimizer.lr=3e-4"),
)

QLORA = (
    'adapters.lora={use="adapters.lora",targets=["*_proj"],rank=16,alpha=32.0}',
    'stages.adapters=["@adapters.*"]',
    'precision.frozen="nf4"',
)

OFFLOADED = (
    *("schedule.use=pipeline.schedules.interleaved_1f1b", "schedule.stages_per_rank=8"),
    *("stages.offload=true", "model.num_hidden_layers=16"),
)


@attrs.frozen
class Case:
    """A recipe and its settings."""

    recipe: str
    settings: tuple[str, ...]


CASES = {
    "8B, float32 states on the host": Case("llama3_8b_one_gpu", (*LIMITS, "batch.global_size=8")),
    "8B, 8-bit states": Case(
        "llama3_8b_one_gpu",
        (*LIMITS, "batch.global_size=4", "optimizer.split_master_weights=false", 'optimizer.state_dtype="uint8"'),
    ),
    "8B, 16 layers, activations on the host": Case(
        "llama3_8b", (*ONE_GPU, *WITHOUT_MASTERS, *OFFLOADED, "batch.global_size=4")
    ),
    "8B, LoRA on NF4": Case("llama3_8b", (*ONE_GPU, *QLORA, "batch.global_size=4", "batch.micro_size=2")),
    "14B, bfloat16 states on the host": Case("qwen2_5_14b_one_gpu", (*LIMITS, "batch.global_size=4")),
    "30B-A3B, LoRA on NF4": Case("qwen3_30b_a3b_lora", ("batch.global_size=4",)),
}

SMALL = (
    *("model.num_hidden_layers=8", "model.hidden_size=64", "model.num_attention_heads=4", "device.kind=cpu"),
    *("model.num_key_value_heads=2", "model.head_dim=16", "model.intermediate_size=128", "vars.length=64"),
    "model.vocab_size=8192",
)


def main() -> None:
    """Print a line per case."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        prepare_data(Path(folder))
        for name, case in CASES.items():
            if not words or any(word in name for word in words):
                begin = time.perf_counter()
                line = train_recipe(Path(folder), case.recipe, (*case.settings, *SMALL * TINY), STEPS)
                print(f"{name:<42}{line}; {time.perf_counter() - begin:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
