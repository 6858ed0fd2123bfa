"""
Learning from completions that share their prompt beside separate rows, in one run: `make bench NAME=shared_prefixes`.

The shapes are those of Qwen3-0.6B in bfloat16, with random weights and no recomputation. Completions are drawn at
random instead of sampled, all of the maximum length. Learning is a step without the sampler: the forward and backward
pass, and AdamW. On paper a step with prompts of 1,024 tokens and 16 completions of 256 has 3.9 times as many FLOPs in
separate rows. Other sizes: ONLY="prompt=512 tokens=1024 group=8"; with turn=128, groups of 4 completions share their
first 128 tokens. ONLY=--tiny trains a small model on a CPU.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import grpo, training
from drawloom.components.rollouts.stages import StageRollouts
from drawloom.ports import Completions, Prompts

PROMPTS = 4
"""Prompts in a step; separate rows of one prompt are a microbatch."""

TURN_GROUP = 4
"""Completions that share a turn."""

SHARED = {
    "kernels": {"attention": "tree"},
    "shared_prefixes": {"use": "phases.shared_prefixes"},
    "trainer": {"phases": [f"@{name}" for name in (*grpo.PHASES[:2], "shared_prefixes", *grpo.PHASES[2:])]},
}
SMALL = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 32,
    "intermediate_size": 1024,
}
"""The model of --tiny."""

PRECISION = {"precision": {"parameter": "float32"}} if grpo.TINY else {}

CONTENDERS: dict[str, dict[str, Any]] = {
    "separate rows": {"batch": {"micro_size": 1}},
    "shared prompts": SHARED | {"batch": {"micro_size": 1}},
    f"shared, {PROMPTS} prompts in a microbatch": SHARED | {"batch": {"micro_size": PROMPTS}},
}


def main() -> None:
    """Print the seconds of a step by contender, without the sampler's."""
    grpo.PROMPTS, grpo.GROUP = PROMPTS, int(grpo.NUMBERS.get("group", 16))
    grpo.PROMPT_LENGTH = int(grpo.NUMBERS.get("prompt", 256 if grpo.TINY else 1024))
    grpo.NEW = int(grpo.NUMBERS.get("tokens", 64 if grpo.TINY else 256))
    training.SMALL |= SMALL
    print(torch.__version__, torch.cuda.get_device_name() if grpo.DEVICE == "cuda" else "CPU")
    print(f"{PROMPTS} prompts of {grpo.PROMPT_LENGTH} tokens, {grpo.GROUP} completions of {grpo.NEW}", flush=True)
    seconds = dict[str, float]()
    with (
        mock.patch.object(StageRollouts, "sample", draw_completions),
        tempfile.TemporaryDirectory(prefix="prefixes-") as name,
    ):
        grpo.write_model(Path(name) / "model")
        for contender, values in CONTENDERS.items():
            if grpo.DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            steps, _ = grpo.measure_drawloom(Path(name), values | PRECISION)
            seconds[contender] = statistics.median(learning for _, learning in steps[2:])
            peak = torch.cuda.max_memory_allocated() / 2**30 if grpo.DEVICE == "cuda" else 0.0
            ratio = seconds["separate rows"] / seconds[contender]
            print(f"{contender:40}{seconds[contender]:9.3f} s{ratio:7.2f} times{peak:7.1f} GiB", flush=True)


def draw_completions(sampler: StageRollouts, prompts: Sequence[Prompts], purpose: str, step: int) -> list[Completions]:
    """Return random completions of the maximum length, in place of `StageRollouts.sample`."""
    return [draw_microbatch(part, sampler.max_tokens) for part in prompts]


def draw_microbatch(prompts: Prompts, count: int) -> Completions:
    """Complete a microbatch's prompts by `count` random ids; rows in a group begin alike."""
    rows, length = prompts.tokens.shape
    shared = torch.randint(2, 64, (rows // TURN_GROUP, int(grpo.NUMBERS.get("turn", 0))))
    own = torch.randint(2, 64, (rows, count - shared.shape[1]))
    tokens = torch.cat([prompts.tokens, shared.repeat_interleave(TURN_GROUP, 0), own], 1)
    logps = torch.full((rows, length + count), -12.0)
    return Completions(
        tokens=tokens,
        starts=prompts.lengths,
        ends=prompts.lengths + count,
        logps=logps,
        entropies=-logps,
        is_ended=torch.zeros(rows, dtype=torch.bool),
    )


if __name__ == "__main__":
    main()
