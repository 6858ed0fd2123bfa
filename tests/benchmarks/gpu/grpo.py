"""
A step of GRPO compared with TRL, in one run: `make bench NAME=grpo`.

Both sample the same number of completions for the same prompts, learn from them once, and take an AdamW step, with the
shapes of Qwen3-0.6B, random weights in bfloat16, and no recomputation. TRL generates with transformers. The random
model hardly ever draws the end token, so that nearly all completions have the maximum length. Sampling is the time
inside the sampler, learning is the rest of the step. Every step is printed as soon as it ends. Exact rollouts by whole
rows take a pass for every token, and are measured by name: ONLY="'drawloom, exact by whole rows' drawloom tokens=48".
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
INSTALL = "pip install --no-deps trl==1.16.0 datasets==4.8.4 multiprocess dill"

import torch  # noqa: E402

from benchmarks.gpu.training import DENSE, SMALL  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS, GROUP = (2, 2) if TINY else (16, 8)
PROMPT_LENGTH = 8 if TINY else 64
NUMBERS = dict(word.split("=") for word in sys.argv if "=" in word)
MICROBATCHES = int(NUMBERS.get("microbatches", 2 if TINY else 4))
NEW = int(NUMBERS.get("tokens", 4 if TINY else 256))
STEPS = 2
"""Measured steps, after two: the first compiles kernels, the second records CUDA graphs."""

PHASES = ("rollout", "advantages", "policy_gradient", "sync_gradients", "clip", "lr", "optimizer", "report")

INVARIANT = {"rollouts": {"exact": True}, "kernels": {"use": "kernels.batch_invariant"}}
"""Settings for ratios of exactly 1."""

GRAPHS = {"capture": {"use": "pipeline.captured"}}
"""Settings for passes launched as CUDA graphs."""

Seconds = list[tuple[float, float]]
"""Sampling and all else, by step."""


def main() -> None:
    """Print a line per contender."""
    print(torch.__version__, torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", flush=True)
    rows = PROMPTS * GROUP
    print(f"{rows} completions of {NEW} tokens, prompts of {PROMPT_LENGTH}", flush=True)
    head = ("sampling s", "tokens/s", "learning s", "tokens/s", "step s", "GiB", "largest difference")
    print(f"{'':36}" + "".join(f"{name:>20}" for name in head), flush=True)
    contenders: dict[str, Callable[[Path], tuple[Seconds, str]]] = {
        "TRL, transformers' generation": measure_trl,
        "drawloom": lambda folder: measure_drawloom(folder, {}),
        "drawloom, batch-invariant": lambda folder: measure_drawloom(folder, INVARIANT),
        "drawloom, CUDA graphs": lambda folder: measure_drawloom(folder, GRAPHS),
        "drawloom, both": lambda folder: measure_drawloom(folder, INVARIANT | GRAPHS),
        "drawloom, exact by whole rows": lambda folder: measure_drawloom(folder, {"rollouts": {"exact": True}}),
    }
    wanted = [word for word in sys.argv[1:] if "=" not in word and word[:2] != "--"] or [*contenders][:5]
    with tempfile.TemporaryDirectory(prefix="grpo-") as name:
        folder = Path(name)
        write_model(folder / "model")
        for contender, measure in contenders.items():
            if contender not in wanted:
                continue
            if contender.startswith("TRL") and not (find_spec("trl") and find_spec("datasets")):
                print(f"{contender:36}not installed: {INSTALL}")
                continue
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            steps, difference = measure(folder)
            sampling, learning = (statistics.median(column) for column in zip(*steps[2:], strict=True))
            peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
            values = (
                f"{sampling:.3f}",
                f"{rows * NEW / sampling:,.0f}",
                f"{learning:.3f}",
                f"{rows * (NEW + PROMPT_LENGTH) / learning:,.0f}",
                f"{sampling + learning:.3f}",
                f"{peak:.1f}",
                difference,
            )
            print(f"{contender:36}" + "".join(f"{value:>20}" for value in values), flush=True)


def write_model(folder: Path) -> None:
    """Write a config, and a tokenizer with a word for every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = DENSE | (SMALL if TINY else {}) | {"architectures": ["Qwen3ForCausalLM"]}
    size = config["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"eos_token": "w0", "pad_token": "w0", "unk_token": "w1"}
    PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **ends).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "bos_token_id": None}))
    lines = [{"prompt": " ".join(f"w{number % 50 + row + 2}" for number in range(PROMPT_LENGTH))} for row in range(999)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines), "utf-8")


def score_text(text: str) -> float:
    """Return the fraction of words with an even last digit."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


class Clock:
    """Seconds inside a function since the last reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time measured."""

        @wraps(function)
        def call_and_measure(*arguments: Any, **options: Any) -> Any:
            began = now()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += now() - began

        return call_and_measure

    def read(self) -> float:
        """Return the seconds, and start again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def add_step(steps: Seconds, sampling: float, learning: float) -> None:
    """Add and print a step's seconds, so that a run that is cut has results."""
    steps.append((sampling, learning))
    print(f"    step {len(steps)}: sampling {sampling:.3f} s, learning {learning:.3f} s", flush=True)


def now() -> float:
    """Return the time when the device has done all work so far; on a CPU, the seconds that it has computed."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def load_recipe(folder: Path, run_folder: Path, values: dict[str, Any]) -> Any:
    """Return the recipe of a run with the model in `folder`, changed by `values`."""
    from drawloom.graph.project import Recipe

    tables: dict[str, Any] = {
        "vars": {"base": str(folder / "model"), "length": PROMPT_LENGTH},
        "run": {"name": "grpo", "folder": str(run_folder)},
        "model": {"weights": False},
        "examples": {"use": "data.json_examples", "paths": [str(folder / "model/prompts.jsonl")]},
        "precision": {"parameter": "bfloat16"},
        "batch": {"global_size": PROMPTS, "micro_size": PROMPTS // MICROBATCHES},
        "rollouts": {"max_tokens": NEW},
        "rollout": {"group_size": GROUP},
        "rewards": {"exact_match": {"use": "rewards.regex", "pattern": r"^\S*[02468] "}},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "never", "best": "loss", "best_is": "lowest"},
        "lr": {"warmup_steps": 0},
        "trainer": {"steps": STEPS + 2, "on_finish": [], "phases": [f"@{name}" for name in PHASES]},
    }
    return Recipe.load("grpo").with_values(tables).with_values(values)


def measure_drawloom(folder: Path, values: dict[str, Any]) -> tuple[Seconds, str]:
    """Return the seconds of the steps, and the largest difference between sampler and training pass."""
    from drawloom.components.rollouts.stages import StageRollouts
    from drawloom.components.run.trainer import Trainer

    clock, run_folder = Clock(), folder / f"run-{len([*folder.iterdir()])}"
    recipe = load_recipe(folder, run_folder, values)
    sample = StageRollouts.sample
    StageRollouts.sample = clock.wrap(sample)  # type: ignore[method-assign]
    try:
        with recipe.open() as run:
            steps: Seconds = []
            began = now()
            for _ in run.get(Trainer).run_and_yield_steps():
                ended, inside = now(), clock.read()
                add_step(steps, inside, ended - began - inside)
                began = now()
    finally:
        StageRollouts.sample = sample  # type: ignore[method-assign]
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    differences = [line["sampler_difference"] for line in lines if line.get("sampler_difference") is not None]
    return steps, f"{max(differences):.3g}" if differences else "-"


def measure_trl(folder: Path) -> tuple[Seconds, str]:
    """Return the seconds of the steps of TRL's trainer."""
    os.environ |= {"WANDB_DISABLED": "true", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [score_text(text) for text in completions]

    prompts = [json.loads(line) for line in (folder / "model/prompts.jsonl").read_text("utf-8").splitlines()]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.bfloat16)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP // MICROBATCHES,
        gradient_accumulation_steps=MICROBATCHES,
        num_generations=GROUP,
        max_completion_length=NEW,
        max_steps=STEPS + 2,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        scale_rewards="none",
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clock, steps = Clock(), Seconds()

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """TRL's trainer, with its generation measured."""

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            return clock.wrap(super()._generate_single_turn)(*arguments, **options)

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = Timed(model, reward, arguments, train_dataset=Dataset.from_list(prompts), processing_class=tokenizer)
    trainer.add_callback(_make_callback(steps, clock))
    trainer.train()
    return steps, "-"


def _make_callback(steps: Seconds, clock: Clock) -> Any:
    """Return a callback that writes down the seconds of every step."""
    from transformers import TrainerCallback

    class Marks(TrainerCallback):  # type: ignore[misc]
        """Readings of the clock around every step."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            inside = clock.read()
            add_step(steps, inside, now() - self.began - inside)

    return Marks()


if __name__ == "__main__":
    main()
