"""The component `model.qwen3.dense`."""

from torch import nn

from drawloom.components.model.qwen3.builder import Qwen3Builder
from drawloom.components.model.qwen3.family import DENSE
from drawloom.components.model.qwen3.swiglu import SwiGLU
from drawloom.graph import component


@component(change="structural")
class Qwen3Dense(Qwen3Builder):
    """A Qwen3 dense language model, of sizes given here or by a Hugging Face `config.json`."""

    family = DENSE

    def feed_forward_of(self, number: int) -> nn.Module:
        return SwiGLU(self.architecture, self.kernels)
