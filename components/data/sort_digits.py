"""A verifiable toy task: sort the digits of a number."""

from collections.abc import Iterator

import torch

from drawloom import between, component, setting
from drawloom.components.data.drawn_task import DrawnTask
from drawloom.components.distributed.rng import create_generator
from drawloom.ports import Example


@component
class SortDigits(DrawnTask):
    """
    Numbers with the `prompt` "310442>" and the `answer` "012344", drawn with the run's seed, without repetition.

    An example also has the `input_ids` of both and the end token, and `labels` without the prompt, for supervised
    training. A number's digits determine its split.
    """

    digits: int = setting("digits of each number", default=6, check=between(1, 19))

    def draw_texts(self) -> Iterator[str]:
        shape = self.examples_drawn, self.digits
        drawn = torch.randint(10, shape, generator=create_generator(self.job.seed, "sort_digits"))
        yield from ("".join(map(str, row)) for row in drawn.tolist())

    def make_example(self, text: str) -> Example:
        prompt, answer = f"{text}>", "".join(sorted(text))
        demonstration = self.encode_turns([(prompt, False), (answer, True)])
        return {"prompt": prompt, "answer": answer, **demonstration, "source": f"number {text}"}
