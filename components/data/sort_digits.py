"""A verifiable toy task: sort the digits of a number."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from drawloom import between, component, internal, setting
from drawloom.components.data.sources.documents import choose_split, validation_fraction
from drawloom.components.distributed.rng import create_generator
from drawloom.ports import IGNORE_INDEX, Example, RunInfo, Split, Tokenizer, complete_document


@component
class SortDigits:
    """
    Numbers with the `prompt` "310442>" and the `answer` "012344", drawn with the run's seed, without repetition.

    An example also has the `input_ids` of both and the end token, and `labels` without the prompt, for supervised
    training. A number's digits determine its split.
    """

    tokenizer: Tokenizer
    job: RunInfo
    digits: int = setting("digits of each number", default=6, check=between(1, 19))
    examples_drawn: int = setting(
        "numbers drawn, before repetitions are dropped", default=8192, check=between(1, 10_000_001)
    )
    validation_fraction: float = validation_fraction("numbers")
    _splits: dict[Split, list[Example]] = internal(factory=dict)

    def open(self) -> None:
        """Draw all numbers."""
        self._splits = {"train": [], "validation": []}
        for number in self._draw_unique_digit_strings():
            self._splits[choose_split(number.encode(), self.validation_fraction)].append(self._make_example(number))

    def close(self) -> None:
        """Free the examples."""
        self._splits = {}

    def examples(self, split: Split) -> list[Example]:
        return self._splits[split]

    def _draw_unique_digit_strings(self) -> Iterator[str]:
        """Yield random digit strings without repetition."""
        shape = self.examples_drawn, self.digits
        drawn = torch.randint(10, shape, generator=create_generator(self.job.seed, "sort_digits"))
        yield from dict.fromkeys("".join(map(str, row)) for row in drawn.tolist())

    def _make_example(self, number: str) -> Mapping[str, Any]:
        """Return a number's example, with prompt and answer as text and as ids."""
        prompt, answer = f"{number}>", "".join(sorted(number))
        prompt_ids, answer_ids = (self.tokenizer.encode(text) for text in (prompt, answer))
        ids = complete_document(self.tokenizer, np.concatenate([prompt_ids, answer_ids])).tolist()
        untrained = len(self.tokenizer.prefix_ids) + len(prompt_ids)
        labels = [IGNORE_INDEX] * untrained + ids[untrained:]
        return {"prompt": prompt, "answer": answer, "input_ids": ids, "labels": labels, "source": f"number {number}"}
