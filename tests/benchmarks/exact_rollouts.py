"""Cost of exact rollouts: CPU seconds for a step of GRPO, as it is, with batch-invariant kernels, and by whole rows."""

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from drawloom.components.run.trainer import Trainer
from drawloom.graph.project import Recipe

STEPS = 5
LENGTHS = {7: 256, 64: 64, 250: 16}
"""Tokens in a completion -> completions in a step."""

MODEL: dict[str, Any] = {
    "use": "model.qwen3.dense",
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch-invariant": {"rollouts": {"exact": True}, "kernels": {"use": "kernels.batch_invariant"}},
    "whole rows": {"rollouts": {"exact": True}},
}


def main() -> None:
    """Print the medians; CPU seconds do not depend on what else the machine does."""
    torch.set_num_threads(1)
    print(f"{'tokens':>8}{'rows':>6}  " + "".join(f"{mode:>18}" for mode in MODES))
    for tokens, rows in LENGTHS.items():
        seconds = {mode: _measure(tokens, rows, values) for mode, values in MODES.items() if _is_shown(tokens, mode)}
        texts = [f"{value:8.3f} s {value / seconds['plain']:6.2f}x" for value in seconds.values()]
        print(f"{tokens:8}{rows:6}  " + "".join(f"{text:>18}" for text in texts), flush=True)


def _is_shown(tokens: int, mode: str) -> bool:
    """Return whether a mode is measured at a length; passes over whole rows take a minute for long ones."""
    return tokens < 100 or mode != "whole rows"


def _measure(tokens: int, rows: int, values: dict[str, Any]) -> float:
    """Return the median CPU seconds of a step, after a first one."""
    with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        tables: dict[str, Any] = {
            "vars": {"base": "unused"},
            "run": {"name": "cost", "folder": str(Path(folder) / "run")},
            "tokenizer": {"use": "data.bytes"},
            "model": MODEL,
            "batch": {"global_size": rows // 16, "micro_size": rows // 16},
            "rewards": {"regex": {"use": "rewards.regex", "pattern": "[a-m]"}},
            "evaluate": {"every": 99, "at_start": False},
            "trainer": {"steps": STEPS + 1, "on_finish": [], "listeners": []},
        }
        recipe = Recipe.load("grpo").with_values(tables).with_values({"rollouts": {"max_tokens": tokens}})
        with recipe.with_values(values).open() as run:
            marks = [time.process_time() for _ in run.get(Trainer).run_and_yield_steps()]
    return statistics.median(after - before for before, after in pairwise(marks))


if __name__ == "__main__":
    main()
