"""A verifiable toy task for tools: add two numbers, with or without the calculator."""

from collections.abc import Iterator
from zlib import crc32

import torch

from drawloom import between, component, setting
from drawloom.components.data.drawn_task import DrawnTask
from drawloom.components.distributed.rng import create_generator
from drawloom.ports import Example


@component
class Sums(DrawnTask):
    """
    Sums with the `prompt` "271+58=" and the `answer` "329", drawn with the run's seed, without repetition.

    The `input_ids` and `labels` are demonstrations for supervised training: one in two calls the calculator as
    [calculator 271+58], reads the result and repeats it; the others answer at once.
    """

    digits: int = setting("largest number of digits", default=3, check=between(1, 10))

    def draw_texts(self) -> Iterator[str]:
        shape = self.examples_drawn, 2
        drawn = torch.randint(10**self.digits, shape, generator=create_generator(self.job.seed, "sums"))
        yield from (f"{a}+{b}" for a, b in drawn.tolist())

    def make_example(self, text: str) -> Example:
        prompt, (a, b) = f"{text}=", map(int, text.split("+"))
        answer = str(a + b)
        calls = [(f"[calculator {text}]", True), (f"{answer}\n", False)] if crc32(text.encode()) % 2 else []
        demonstration = self.encode_turns([(prompt, False), *calls, (answer, True)])
        return {"prompt": prompt, "answer": answer, **demonstration, "source": f"sum {text}"}
