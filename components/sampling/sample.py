"""A short text from the finished model, for people to look at."""

import logging
import os

from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import Stages
from drawloom.components.ports.run import Randomness, RunFolder
from drawloom.components.sampling.generate import generate
from drawloom.graph import above, at_least, component, setting

log = logging.getLogger("drawloom.run")


@component(change="free")
class Sample:
    """Continues a prompt, prints the text and writes it to `sample.txt` in the run folder."""

    stages: Stages
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
        """Whether the text is there."""
        return (self.folder.folder / "sample.txt").exists()

    def finish(self) -> None:
        """Draw the text on the main rank."""
        if self.mesh.world.rank != 0:
            return
        prompt = [int(token) for token in self.tokenizer.encode(self.prompt)] or [self.tokenizer.end]
        drawn = generate(
            self.stages.local[0].module,
            prompt,
            tokens=self.tokens,
            context=self.context,
            end=self.tokenizer.end,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=self.randomness.stream("sample"),
        )
        text = self.prompt + self.tokenizer.decode(list(drawn))
        log.info("a sample:\n%s", text)
        aside = self.folder.folder / "sample.txt.tmp"
        aside.write_text(text, "utf-8")
        os.replace(aside, self.folder.folder / "sample.txt")
