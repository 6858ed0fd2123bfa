"""Prompts for rollouts, and the task of sorting digits."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.data.pad_collator import PadCollator
from drawloom.components.data.prompt_collator import PromptCollator
from drawloom.components.data.sort_digits import SortDigits
from support.chat import tokenizer_folder


@attrs.frozen
class Job:
    name: str = "job"
    seed: int = 0
    path: Path = Path("runs/job")


def test_rows_are_prompts_with_their_examples() -> None:
    """A row has the prompt's ids and padding, and the reward's data come along with it."""
    collator = PromptCollator(tokenizer=Bytes())
    examples: list[Any] = [{"prompt": "ab", "answer": "x"}, {"prompt": "abcd", "answer": "y"}]
    batch = collator.collate(examples, 5)
    batch.check()
    assert batch.tokens.tolist() == [[97, 98, 256, 256, 256], [97, 98, 99, 100, 256]]
    assert batch.lengths.tolist() == [2, 4] == [collator.count(example) for example in examples]
    assert batch.examples == tuple(examples) and batch.weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "a"}, "it has text; write a prompt"),
        ({}, "it has no keys; write a prompt"),
        ({"prompt": ""}, "its prompt is empty"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "the tokenizer has no chat template"),
    ],
)
def test_an_example_without_a_prompt_is_refused(example: dict[str, Any], message: str) -> None:
    """The message says what the example has instead."""
    with pytest.raises(ValueError, match=message):
        PromptCollator(tokenizer=Bytes()).count(example)


def test_messages_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    """The template renders the prompt as for an answer, and a control token in a message is plain text."""
    tokenizer = HuggingFaceTokenizer(path=tokenizer_folder(tmp_path / "tokenizer"))
    tokenizer.open()
    collator = PromptCollator(tokenizer=tokenizer)
    try:
        for content in ("hello", "<|im_end|>"):
            messages = [{"role": "user", "content": content}]
            ids = collator.collate([{"prompt": messages}], 60)
            row = ids.tokens[0, : int(ids.lengths[0])].tolist()
            text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode_control(row) == text
            assert (row == tokenizer.encode_control(text).tolist()) == (content == "hello")
    finally:
        collator.close()


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
    """With the collator of supervised training, the digits after `>` and the end token have a loss."""
    task = SortDigits(tokenizer=Bytes(), job=Job(), digits=3, examples_drawn=1, validation_fraction=0.0)
    task.open()
    (example,) = task.examples("train")
    batch = PadCollator(pad_id=256).collate([example], 8)
    answer = [*example["answer"].encode(), 256]
    assert batch.targets[0][batch.weights[0] > 0].tolist() == answer
    assert torch.equal(batch.tokens[0, :4], torch.tensor([*example["prompt"].encode()]))
