"""The parts of a transformers model: base model, embedding, layers and head, by name."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn


class SelfCheckError(Exception):
    """Failed self-check: the name of the check, and the reason."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(f"{check}: {reason}")
        self.check = check
        self.reason = reason


@attrs.frozen
class Parts:
    """
    Names of a causal LM's parts, which differ between families: `model.layers`, `transformer.h`.

    The modules `before` the layers, except for the embedding, and `after` them belong to the first and last stage. A
    `plain_head` is a linear layer; logits of other heads are computed by transformers. `no_stages` is why the model
    can't be several pipeline stages, or "". `constants` maps names without layer numbers to the initial value of
    parameters that start at a constant.
    """

    base: str
    layers: str
    embedding: str
    head: str
    tied: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    plain_head: bool = True
    no_stages: str = ""
    constants: Mapping[str, float] = attrs.field(factory=dict)


def get_first_line(error: Exception) -> str:
    """Return the first line in an error's text that does not end in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)


def first_config_value(config: Any, *keys: str) -> Any:
    """Return the value of the first key that a transformers config has, unless it is null; None without such a key."""
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), None)


def mask_layer_number(name: str) -> str:
    """Return a parameter's name with the number of its layer replaced by a star."""
    return re.sub(r"\.\d+\.", ".*.", name)


def find_model_parts(whole: Any) -> Parts:
    """Find a causal LM's embedding, layers, norm and head. Raises SelfCheckError for a model without these parts."""
    names = {part: name for name, part in whole.named_modules()}
    try:
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # the model's class has none
        embedding, head = None, None
    if not isinstance(embedding, nn.Embedding) or "." not in names[embedding]:
        raise SelfCheckError("layers", "the model has no base model with a token embedding")
    base = whole.get_submodule(names[embedding].partition(".")[0])
    if type(head) is not nn.Linear or {names[part] for part in whole.children()} != {names[base], names[head]}:
        raise SelfCheckError("head", f"{type(whole).__name__} is not just a base model and a linear head")
    count = first_config_value(whole.config, "num_hidden_layers")
    lists = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    fitting = [part for part in lists if len(part) == count and any(True for _ in part.parameters())]
    if not fitting:
        lengths = sorted({len(part) for part in lists})
        raise SelfCheckError(
            "layers", f"no ModuleList has num_hidden_layers = {count} modules; their lengths are {lengths}"
        )
    return Parts(names[base], names[fitting[0]], names[embedding], names[head], head.weight is embedding.weight)


@attrs.define
class CallOrder:
    """Names of modules outside the layers, called before these and after them."""

    before: dict[str, None] = attrs.field(factory=dict)
    after: dict[str, None] = attrs.field(factory=dict)

    def add_to_parts(self, whole: nn.Module, parts: Parts) -> Parts:
        """Add the modules before and after the layers to the parts; a module called in both is in neither."""
        parameters = [name for name, _ in whole.named_parameters()]
        # Modules without parameters, such as rotary angles, are part of every stage.
        before = [name for name in self.before if any(parameter.startswith(f"{name}.") for parameter in parameters)]
        return attrs.evolve(
            parts,
            before=tuple(name for name in before if name not in self.after),
            after=tuple(name for name in self.after if name not in self.before),
        )


@contextmanager
def record_call_order(whole: nn.Module, parts: Parts) -> Iterator[CallOrder]:
    """Record when modules outside the layers are called."""
    order = CallOrder()
    calls = order.before

    def switch(to: dict[str, None], *_: Any) -> None:
        nonlocal calls
        calls = to

    def record(name: str, *_: Any) -> None:
        calls[name] = None

    layers: Any = whole.get_submodule(parts.layers)
    owner = whole.get_submodule(parts.layers.rpartition(".")[0])
    hooks = [owner.register_forward_pre_hook(partial(switch, order.before))]
    hooks += [layer.register_forward_hook(partial(switch, order.after)) for layer in layers]
    for name, part in find_modules_outside_layers(whole, parts):
        hooks.append(part.register_forward_pre_hook(partial(record, name)))
    try:
        yield order
    finally:
        for hook in hooks:
            hook.remove()


def find_modules_outside_layers(whole: nn.Module, parts: Parts) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules of the base model, by name, without the layers and the embedding of tokens."""
    modules = []
    owner = parts.layers.rpartition(".")[0]
    while owner:
        modules += [(f"{owner}.{name}", part) for name, part in whole.get_submodule(owner).named_children()]
        owner = owner.rpartition(".")[0]
    on_the_way = {name for name, _ in modules if f"{parts.layers}.".startswith(f"{name}.")}
    return [(name, part) for name, part in modules if name not in on_the_way | {parts.embedding}]


class PassThrough(nn.Module):
    """
    Placeholder for a module outside of the span, which returns its first input.

    Layers keep their numbers, and plain attributes that a model's forward pass reads from a layer.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float)}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return hidden states (rows, length, hidden_size) unchanged."""
        return hidden_states


class NoVectors(PassThrough):
    """Placeholder for a table of vectors that the first stage adds to token vectors, such as learned positions."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return zero, of shape (), which is added."""
        return torch.zeros(())
