"""A final task that samples a short text from the trained model."""

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
    prompt: str = setting(default="", doc="the beginning of the text")
    tokens: int = setting(default=200, check=at_least(1), doc="most tokens to sample")
    context: int = setting(default=256, check=at_least(1), doc="number of last tokens that the model sees")
    temperature: float = setting(default=0.8, check=at_least(0), doc="0 is greedy: the most likely token each time")
    top_k: int | None = setting(default=None, check=above(0), doc="sample from this many most likely tokens only")

    def is_finished(self) -> bool:
        """Whether rank 0 finds the text's file; equal on all ranks."""
        return bool(self.mesh.world.gather_json(self._target.exists())[0])

    def finish(self) -> None:
        """Sample the text on the first pipeline, and write it on rank 0."""
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
