"""measure a run's loss or rewards on its validation split, or its loss on other text"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from drawloom import Container
from drawloom.components.commands._trained import CheckpointCommand, CheckpointResult, get_if_any
from drawloom.components.data.packing.windows import Windows
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import FORMATS
from drawloom.graph.cli.command import Count, Project, Recipe, UserError, command, option, output, output_class
from drawloom.graph.recipe.overrides import nest_values
from drawloom.ports import (
    LOSSES,
    Batching,
    Corpus,
    Executor,
    Loss,
    MeasuresStep,
    PackedDataset,
    Reward,
    RewardEvaluation,
    Rollouts,
    Scorer,
    Split,
    TokenBatch,
    TokenCorpus,
    Tokenizer,
    count_target_bytes,
    create_step_state,
    require_token_batch,
    sum_losses_and_weights,
    uses_preference_pairs,
)

READERS = {"text": "data.text_files", "json": "data.jsonl", "parquet": "data.parquet", "arrow": "data.parquet"}
MAX_LOADED = 16  # microbatches that are in memory together


@output_class
class EvaluateResult(CheckpointResult):
    """Mean loss of a run's weights."""

    loss: float = output("mean loss per token, pair or text")
    weight: float = output("number of tokens, pairs or texts")
    unit: str = output("tokens, pairs or texts")
    perplexity: float | None = output("exponential of the cross entropy, if the loss has one")
    bits_per_byte: float | None = output("cross entropy in bits per byte of text, if the loss has one")
    documents: str = output("number of documents longer than a row, with --corpus only")

    def render(self, format: str) -> str:
        """Return the loss with its other units, and the documents."""
        perplexity = "" if self.perplexity is None else f", perplexity {self.perplexity:.4g}"
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        loss = f"loss {self.loss:.4f} over {self.weight:,.0f} {self.unit}{perplexity}{bits}"
        line = f"{self.origin}: {loss}"
        return f"{line}\n{self.documents}" if self.documents else line


@output_class
class EvaluateRewardsResult(CheckpointResult):
    """Mean rewards for completions by a run's weights."""

    completions: int = output("completion count")
    reward: float | None = output("mean total reward, weighted; null if no completion has a score")
    rewards: Mapping[str, float | None] = output("mean by reward, without its weight")
    length: float | None = output("mean token count")
    truncated: float | None = output("fraction of completions that reached the maximum length without an end")

    def render(self, format: str) -> str:
        """Return a line with all means; text is the only `format`."""
        values = {"reward": self.reward, **self.rewards, "truncated": self.truncated}
        shown = ", ".join(f"{name} {'none' if value is None else f'{value:.4f}'}" for name, value in values.items())
        return f"{self.origin}: {shown}, {self.length:.1f} tokens, {self.completions} completions"


@command
class EvaluateCommand(CheckpointCommand):
    """The mean loss per token with conversions to other units, or the mean rewards."""

    computes_loss: ClassVar[bool] = True
    corpus: Sequence[str] = option(
        "measure the documents in these text, JSON-lines, Parquet or Arrow files (default: the validation rows)",
        default=(),
        metavar="GLOB",
        nargs="+",
        exclusive="data",
    )
    stride: Count | None = option(
        "tokens by which the window moves over documents longer than a row (default: half a row)", needs="corpus"
    )
    generate: bool = option(
        "complete the validation prompts, and measure the rewards of the completions", exclusive="data"
    )
    samples: Count | None = option("completions of each prompt (default: the recipe's)", needs="generate")

    def run(self, project: Project) -> EvaluateResult | EvaluateRewardsResult:
        if self.generate:
            return self._measure_rewards(project)
        split: Split = "train" if self.corpus else "validation"  # all of --corpus is in the training split
        corpus = _make_corpus_node(self.corpus) if self.corpus else None
        change = partial(_replace_data_by_corpus, corpus=corpus, stride=self.stride) if corpus else None
        ports = (Executor, PackedDataset, Batching, *([TokenCorpus] if corpus else []))
        with self.open_run(project, *ports, every=(Tokenizer,), change=change) as run:
            if not run.nodes.get(PackedDataset).count_rows(split):
                raise UserError(
                    f"--corpus: there is nothing to predict in {' '.join(self.corpus)}"
                    if self.corpus
                    else f"{self.run_folder}: the validation split is empty; name text files with --corpus",
                    2,
                )
            return _measure_loss(run.nodes, split, self.run_folder, run.step)

    def _measure_rewards(self, project: Project) -> EvaluateRewardsResult:
        """Complete all validation prompts, and return the mean rewards."""
        change = partial(_sample_and_set_count, samples=self.samples)
        ports = (RewardEvaluation, PackedDataset, Batching)
        with self.open_run(project, *ports, every=(Reward,), change=change) as run:
            rows, size = run.nodes.get(PackedDataset), run.nodes.get(Batching).micro_size
            count = rows.count_rows("validation")
            if not count:
                raise UserError(f"{self.run_folder}: the validation split has no prompts to complete", 2)
            batches = (rows.batch("validation", indices) for indices in _split_into_ranges(count, size))
            means = run.nodes.get(RewardEvaluation).sample_and_average_rewards(batches)
        return EvaluateRewardsResult(self.run_folder, run.step, **attrs.asdict(means))


def _sample_and_set_count(recipe: Recipe, samples: int | None) -> Recipe:
    """
    Sample from the stages instead of a server, and set the completion count per prompt.

    Raises UserError for a recipe without prompts and rewards.
    """
    names = recipe.graph.implementers(RewardEvaluation)
    if not names:
        text = "the run's recipe measures no rewards"
        raise UserError(f"--generate: {text}; use a run with phases.evaluate_rewards, such as of the recipe grpo", 2)
    for name in recipe.graph.implementers(Rollouts):
        node = recipe.graph.nodes[name]
        if "folder" in node.edges:  # it would write into the run folder, and may belong to a run that goes on
            settings = {key: node.settings[key] for key in ("max_tokens", "temperature")}
            recipe = recipe.with_values(nest_values(name, {"use": "rollouts.stages", **settings}), "--generate")
    return recipe.with_values(nest_values(names[0], {"samples": samples}), "--samples") if samples else recipe


def _measure_loss(run: Container, split: Split, folder: Path | str, step: int) -> EvaluateResult:
    """Evaluate all rows of a split, and return the mean loss per token, or per pair with preference data."""
    rows, tokenizer = run.get(PackedDataset), get_if_any(run, Tokenizer)
    sizes = None if tokenizer is None else torch.as_tensor(tokenizer.token_byte_counts()).double()
    total, weight, nats, text_bytes = 0.0, 0.0, 0.0, 0.0
    loss, size = run.get(Loss), run.get(Batching).micro_size
    # A loss that measures the step measures all rows together, as in the run's evaluations.
    loaded = rows.count_rows(split) if isinstance(loss, MeasuresStep) else size * MAX_LOADED
    for batches in _load_microbatch_lists(rows, split, size, loaded):
        state = create_step_state(batches)
        run.get(Executor).evaluate(state)
        sums = [float(number) for number in sum_losses_and_weights(state)]
        total, weight = total + sums[0], weight + sums[1]
        named = state[LOSSES]["sums"]
        nats = nats + float(named["cross_entropy"].double().sum()) if "cross_entropy" in named else math.nan
        if sizes is not None:
            text_bytes += sum(float(count_target_bytes(batch.targets, batch.weights, sizes)) for batch in batches)
    unit = "pairs" if uses_preference_pairs(type(rows)) else "texts" if isinstance(loss, Scorer) else "tokens"
    has_nats = not math.isnan(nats)  # other losses have no cross entropy
    # Tokens at the end of a document stand for no byte, and are part of the loss.
    return EvaluateResult(
        run_folder=folder,
        step=step,
        loss=total / weight,
        weight=weight,
        unit=unit,
        perplexity=math.exp(min(nats / weight, 700)) if has_nats else None,
        bits_per_byte=nats / math.log(2) / text_bytes if has_nats and text_bytes else None,
        documents=_describe_long_documents(rows, run, split) if isinstance(rows, Windows) else "",
    )


def _make_corpus_node(globs: Sequence[str]) -> dict[str, Any]:
    """Return a corpus node for the files. Raises UserError for no files, or for several formats."""
    try:
        files = {READERS[FORMATS.get(file.suffix, "text")]: file.path for file in find_files(globs)}
    except UserError as error:
        raise UserError(f"--corpus: {str(error).removeprefix('paths: ')}", 2) from error
    if len(files) > 1:
        raise UserError(f"--corpus: {' and '.join(files.values())} differ in format; measure one after the other", 2)
    return {"use": next(iter(files)), "paths": list(globs), "validation_fraction": 0.0}


def _replace_data_by_corpus(recipe: Recipe, corpus: dict[str, Any], stride: int | None = None) -> Recipe:
    """Replace a recipe's data (a store, conversations or pairs) by a corpus packed into rows of whole documents."""
    graph = recipe.graph
    # nodes with an owner are sources of a mixture, which is replaced as a whole
    names, tokens = (
        [name for name in graph.implementers(port) if not graph.nodes[name].owner] for port in (Corpus, TokenCorpus)
    )
    names = names or ["corpus"]
    changes: dict[str, Any] = dict.fromkeys(names, corpus)
    for name in tokens or ["tokens"]:
        changes[name] = {"use": "data.tokenized_text", "corpus": f"@{names[0]}"}
    for name in graph.implementers(PackedDataset):
        settings = graph.nodes[name].settings
        length = (
            settings["length"] if "length" in settings else settings["max_length"]
        )  # packing of examples and of pairs
        changes[name] = {"use": "data.packing.windows", "length": length} | ({"stride": stride} if stride else {})
    for name in graph.implementers(Loss):
        if uses_preference_pairs(graph.nodes[name].spec.cls):
            changes[name] = {"use": "loss.next_token"}
    for name, values in changes.items():
        recipe = recipe.with_values(nest_values(name, values), "--corpus")
    return recipe


def _describe_long_documents(rows: Windows, run: Container, split: Split) -> str:
    """Return a text with the counts of documents, and of documents longer than a row."""
    lengths = run.get(TokenCorpus).documents(split).lengths
    long, count = int((lengths > rows.length + 1).sum()), len(lengths)
    whole = f"{count:,} document{'s' * (count != 1)}, each on its own"
    return (
        f"{whole}; {long:,} longer than a row of {rows.length:,} tokens, in windows that move by {rows.window_stride:,}"
    )


def _load_microbatch_lists(rows: PackedDataset, split: Split, size: int, max_loaded: int) -> Iterator[list[TokenBatch]]:
    """Yield a split's rows as lists of microbatches with `size` rows, with at most `max_loaded` rows in a list."""
    for loaded in _split_into_ranges(rows.count_rows(split), max_loaded):
        ranges = (loaded[batch.start : batch.stop] for batch in _split_into_ranges(len(loaded), size))
        yield [require_token_batch(rows.batch(split, indices), "evaluate") for indices in ranges]


def _split_into_ranges(count: int, size: int) -> Iterator[range]:
    """Yield the indices below `count`, at most `size` at a time."""
    return (range(start, min(start + size, count)) for start in range(0, count, size))
