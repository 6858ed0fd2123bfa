"""The digit-sorting task."""

from pathlib import Path

import attrs
import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.pad_collator import PadCollator
from drawloom.components.data.sort_digits import SortDigits


@attrs.frozen
class Job:
    name: str = "job"
    seed: int = 0
    folder_path: Path = Path("runs/job")


def test_digits_are_sorted_and_splits_disjoint() -> None:
    """Answers are the sorted prompts, without repetition over both splits; the seed decides the numbers."""
    first, again, other = (SortDigits(tokenizer=Bytes(), job=Job(seed=seed), examples_drawn=500) for seed in (0, 0, 1))
    for task in (first, again, other):
        task.open()
    train, held_out = first.examples("train"), first.examples("validation")
    prompts = [example["prompt"] for example in (*train, *held_out)]
    assert len({*prompts}) == len(prompts) and 450 < len(prompts) <= 500 and len(held_out) > 5
    for example in (*train, *held_out):
        assert example["answer"] == "".join(sorted(example["prompt"][:-1])) and len(example["answer"]) == 6
    assert again.examples("train") == train != other.examples("train")


def test_supervised_rows_train_the_answer_and_its_end() -> None:
    """With the supervised collator, the digits after `>` and the end token have a loss."""
    task = SortDigits(tokenizer=Bytes(), job=Job(), digits=3, examples_drawn=1, validation_fraction=0.0)
    task.open()
    (example,) = task.examples("train")
    batch = PadCollator(pad_id=256).collate([example], 8)
    answer = [*example["answer"].encode(), 256]
    assert batch.targets[0][batch.weights[0] > 0].tolist() == answer
    assert torch.equal(batch.tokens[0, :4], torch.tensor([*example["prompt"].encode()]))
