"""A short text from the finished model, for people to look at."""

import logging
from pathlib import Path

from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Predictor
from drawloom.components.ports.run import Randomness, RunFolder
from drawloom.components.sampling.generate import Sampler
from drawloom.components.storage.atomic_write import replace_file
from drawloom.graph import above, at_least, component, setting

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class Sample:
    """Continues a prompt, prints the text and writes it to `sample.txt` in the run folder."""

    model: Predictor
    tokenizer: Tokenizer
    folder: RunFolder
    randomness: Randomness
    mesh: Mesh
    prompt: str = setting(default="", doc="what the text begins with")
    tokens: int = setting(default=200, check=at_least(1), doc="how many tokens to draw at most")
    context: int = setting(default=256, check=at_least(1), doc="how many tokens back the model looks")
    temperature: float = setting(default=0.8, check=at_least(0), doc="0 takes the likeliest token each time")
    top_k: int | None = setting(default=None, check=above(0), doc="draw from this many likeliest tokens only")

    def is_finished(self) -> bool:
        """Whether the text is there, as the main rank sees it."""
        return bool(self.mesh.world.gather_json(self._target.exists())[0])

    def finish(self) -> None:
        """Draw the text on the ranks of the first replica, and write it on the main one."""
        if self.mesh.replicas.rank != 0:
            return
        prompt = [int(token) for token in self.tokenizer.encode(self.prompt)] or [self.tokenizer.eos_id]
        text = self.prompt + self.tokenizer.decode(list(self._sampler().continued(prompt, self.tokens)))
        if self.mesh.world.rank == 0:
            log.info("a sample:\n%s", text)
            replace_file(self._target, text.encode())

    def _sampler(self) -> Sampler:
        return Sampler(
            model=self.model,
            pipeline=self.mesh.group("pipeline"),
            generator=self.randomness.stream("sample"),
            end=self.tokenizer.eos_id,
            context=self.context,
            temperature=self.temperature,
            top_k=self.top_k,
        )

    @property
    def _target(self) -> Path:
        return self.folder.folder / "sample.txt"
