"""The component `model.qwen3.dense`."""

from torch import nn

from drawloom.components.model.qwen3.builder import Blueprint
from drawloom.components.model.qwen3.family import DENSE
from drawloom.components.model.qwen3.swiglu import FeedForward
from drawloom.graph import component


@component(change="structural")
class Qwen3Dense(Blueprint):
    """A Qwen3 dense language model, of sizes given here or by a Hugging Face `config.json`."""

    family = DENSE

    def mlp_of(self, number: int) -> nn.Module:
        return FeedForward(self.architecture, self.kernels)
