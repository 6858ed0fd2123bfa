"""Base for toy tasks with verifiable answers."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from drawloom import between, internal, setting
from drawloom.components.data.sources.documents import choose_split, validation_fraction
from drawloom.graph import component_base_class
from drawloom.ports import IGNORE_INDEX, Example, RunInfo, Split, Tokenizer


@component_base_class
class DrawnTask:
    """Base for examples drawn with the run's seed, without repetition; the drawn text determines its split."""

    tokenizer: Tokenizer
    job: RunInfo
    examples_drawn: int = setting(
        "numbers drawn, before repetitions are dropped", default=8192, check=between(1, 10_000_001)
    )
    validation_fraction: float = validation_fraction("numbers")
    _splits: dict[Split, list[Example]] = internal(factory=dict)

    def open(self) -> None:
        """Draw all examples."""
        self._splits = {"train": [], "validation": []}
        for text in dict.fromkeys(self.draw_texts()):
            self._splits[choose_split(text.encode(), self.validation_fraction)].append(self.make_example(text))

    def close(self) -> None:
        """Free the examples."""
        self._splits = {}

    def examples(self, split: Split) -> list[Example]:
        return self._splits[split]

    @abstractmethod
    def draw_texts(self) -> Iterator[str]:
        """Yield random texts."""

    @abstractmethod
    def make_example(self, text: str) -> Example:
        """Return a text's example."""

    def encode_turns(self, turns: list[tuple[str, bool]]) -> dict[str, Any]:
        """Return `input_ids` and `labels`; a trained turn has its end token, and other turns have no labels."""
        ids = [*self.tokenizer.prefix_ids]
        labels = [IGNORE_INDEX] * len(ids)
        for text, is_trained in turns:
            end = [*self.tokenizer.suffix_ids, self.tokenizer.eos_id] if is_trained else []
            added = [*self.tokenizer.encode(text).tolist(), *end]
            ids += added
            labels += added if is_trained else [IGNORE_INDEX] * len(added)
        return {"input_ids": ids, "labels": labels}
