"""A search for a word of the field finds the right file and the right page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for name in ("graph", "components", "kernels") for path in (ROOT / name).rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
MAX_FILES = 8
"""Number of files a reader opens, in order of how often they use the word."""
MAX_PAGES = 4
"""Number of pages a reader opens."""

# A newcomer's question: the word of the field, the file that answers, and the page that answers.
QUESTIONS = {
    "how do I use gradient accumulation?": ("gradient accumulation", "run/batch.py", "howto/gpus.md"),
    "where is activation checkpointing?": ("activation checkpointing", "ports/stages.py", "kernels.md"),
    "what is the sequence length?": ("sequence length", "ports/data.py", "data.md"),
    "how do I set the batch size?": ("batch size", "run/batch.py", "howto/gpus.md"),
    "are there float32 master weights?": ("master weights", "parallel/master_weights.py", "howto/pretraining.md"),
    "is flash attention used?": ("flash attention", "kernels/auto.py", "kernels.md"),
    "how does DDP work here?": ("ddp", "parallel/ddp.py", "howto/gpus.md"),
    "how does FSDP work here?": ("fsdp", "parallel/fsdp.py", "meshes.md"),
    "is there HSDP?": ("hsdp", "parallel/fsdp.py", "meshes.md"),
    "is there ZeRO?": ("zero-3", "parallel/fsdp.py", "meshes.md"),
    "is there tensor parallelism?": ("tensor parallel", "parallel/tensor.py", "meshes.md"),
    "is there context parallelism?": ("context parallel", "parallel/context.py", "howto/gpus.md"),
    "is there expert parallelism?": ("expert parallel", "parallel/expert.py", "howto/gpus.md"),
    "is there 1F1B?": ("1f1b", "pipeline/schedules/one_f_one_b.py", "schedules.md"),
    "how do I warm up the learning rate?": ("warmup", "learning_rate/warmup.py", "howto/optimizers.md"),
    "is there a cosine schedule?": ("cosine", "learning_rate/cosine.py", "howto/optimizers.md"),
    "which weights have weight decay?": ("weight decay", "optim/parameter_groups.py", "howto/optimizers.md"),
    "how do I get gradient clipping?": ("gradient clipping", "gradients/clip_norm.py", "howto/optimizers.md"),
    "is there an exponential moving average?": ("exponential moving average", "phases/ema.py", "howto/optimizers.md"),
    "what happens at a loss spike?": ("loss spike", "phases/loss_spikes.py", "howto/optimizers.md"),
    "how do I train in mixed precision?": ("mixed precision", "distributed/precision.py", "howto/pretraining.md"),
    "is there LoRA?": ("lora", "adapters/lora.py", "finetuning.md"),
    "is there DPO?": ("dpo", "loss/dpo.py", "howto/preferences.md"),
    "how is a chat template rendered?": ("chat template", "data/chat/template.py", "finetuning.md"),
    "is there packing?": ("packing", "data/packing/packed_rows.py", "data.md"),
    "how is the MFU computed?": ("mfu", "metrics/utilization.py", "howto/speed.md"),
    "how do I measure perplexity?": ("perplexity", "metrics/perplexity.py", "howto/evaluation.md"),
    "how do I run lm-eval?": ("lm-eval", "commands/models/lm_eval.py", "howto/evaluation.md"),
    "how do I resume?": ("resume", "run/trainer.py", "howto/resume.md"),
    "how do I log to Weights & Biases?": ("weights & biases", "trackers/wandb.py", "howto/trackers.md"),
    "where do CUDA graphs pay?": ("cuda graph", "pipeline/captured.py", "kernels.md"),
    "does it use torch.compile?": ("torch.compile", "stages/compiled.py", "kernels.md"),
    "where is the load-balancing loss of experts?": ("load-balancing", "model/decoder/experts.py", "families.md"),
    "is there a sliding window?": ("sliding window", "model/mistral.py", "families.md"),
    "is training deterministic?": ("deterministic", "run/randomness.py", "kernels.md"),
    "how does it start under torchrun?": ("torchrun", "distributed/torchrun.py", "clusters.md"),
}


def texts(paths: list[Path], folder: str) -> dict[str, str]:
    """Return path -> lower-case text with single spaces. Paths have no `folder` prefix."""
    return {
        str(path.relative_to(ROOT)).removeprefix(folder): " ".join(path.read_text("utf-8").lower().split())
        for path in paths
    }


def rank_files(files: dict[str, str], word: str) -> list[str]:
    """Return the files with a word in their name or text: names first, then by number of uses."""
    pattern = re.compile(r"(?<![a-z])" + re.escape(word))
    uses = {path: len(pattern.findall(text)) for path, text in files.items()}
    uses |= {path: count + 1000 for path, count in uses.items() if re.sub(r"[ -]", "_", word) in path}
    return sorted((path for path, count in uses.items() if count), key=lambda path: -uses[path])


FILES = texts(SOURCES, "components/")
DOCUMENTS = texts(PAGES, "docs/")


@pytest.mark.parametrize("question", QUESTIONS)
def test_word_of_the_field_leads_to_file_and_page(question: str) -> None:
    """The right file and page are among the first few by name or by number of uses."""
    word, file, page = QUESTIONS[question]
    files, pages = rank_files(FILES, word)[:MAX_FILES], rank_files(DOCUMENTS, word)[:MAX_PAGES]
    assert file in files, files
    assert page in pages, pages
