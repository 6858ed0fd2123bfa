"""The parts of a transformers model: base model, embedding, layers and head, by name."""

import re
from typing import Any, Self

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
    `plain_head` is a linear layer; logits of other heads are computed by transformers.
    """

    base: str
    layers: str
    embedding: str
    head: str
    tied: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    plain_head: bool = True


def first_config_value(config: Any, *keys: str) -> Any:
    """Return the value of the first key that a transformers config has, unless it is null; None without such a key."""
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), None)


def mask_layer_number(name: str) -> str:
    """Return a parameter's name with the number of its layer replaced by a star."""
    return re.sub(r"\.\d+\.", ".*.", name)


def find_model_parts(whole: Any) -> Parts:
    """Find a causal LM's embedding, layers, norm and head. Raises SelfCheckError for a model without these parts."""
    names = {part: name for name, part in whole.named_modules()}
    embedding, head = _get_embeddings(whole)
    if not isinstance(embedding, nn.Embedding) or "." not in names[embedding]:
        raise SelfCheckError("layers", "the model has no base model with a token embedding")
    base = whole.get_submodule(names[embedding].partition(".")[0])
    if type(head) is not nn.Linear or {names[part] for part in whole.children()} != {names[base], names[head]}:
        raise SelfCheckError("head", f"{type(whole).__name__} is not just a base model and a linear head")
    return Parts(
        names[base], names[_find_layers(whole, base)], names[embedding], names[head], head.weight is embedding.weight
    )


def _get_embeddings(whole: Any) -> tuple[Any, Any]:
    """Return transformers' input and output embedding modules; None if the model class has none."""
    try:
        return whole.get_input_embeddings(), whole.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None, None


def _find_layers(whole: Any, base: nn.Module) -> nn.ModuleList:
    """Return the ModuleList with num_hidden_layers modules. Raises SelfCheckError if there is none."""
    count = first_config_value(whole.config, "num_hidden_layers")
    lists = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    fitting = [part for part in lists if len(part) == count and any(True for _ in part.parameters())]
    if not fitting:
        lengths = sorted({len(part) for part in lists})
        raise SelfCheckError(
            "layers", f"no ModuleList has num_hidden_layers = {count} modules; their lengths are {lengths}"
        )
    return fitting[0]


class CallOrder:
    """Context that records whether modules outside of the layers are called before or after these."""

    def __init__(self, whole: nn.Module, parts: Parts) -> None:
        self.parts = parts
        self._layers_ended = False
        self._before: dict[str, None] = {}
        self._after: dict[str, None] = {}
        layers: Any = whole.get_submodule(parts.layers)
        owner = whole.get_submodule(parts.layers.rpartition(".")[0])
        self._hooks = [owner.register_forward_pre_hook(self._mark_before_layers)]
        self._hooks += [layer.register_forward_hook(self._on_layer_end) for layer in layers]
        for name, part in find_modules_outside_layers(whole, parts):
            self._hooks.append(part.register_forward_pre_hook(self._create_call_recorder(name)))
        self._parameters = {name for name, _ in whole.named_parameters()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def list_observed_parts(self) -> Parts:
        """Add the modules before and after the layers to the parts; a module called in both is in neither."""
        before = tuple(name for name in self._before if name not in self._after and self._has_parameters(name))
        after = tuple(name for name in self._after if name not in self._before)
        return attrs.evolve(self.parts, before=before, after=after)

    def _has_parameters(self, name: str) -> bool:
        """Return whether a module has parameters; modules without, such as rotary angles, are part of every stage."""
        return any(parameter.startswith(f"{name}.") for parameter in self._parameters)

    def _mark_before_layers(self, *_: Any) -> None:
        """Note that a forward pass begins: modules called from now on come before the layers."""
        self._layers_ended = False

    def _on_layer_end(self, *_: Any) -> None:
        """Note that a layer has run: modules called from now on come after the layers."""
        self._layers_ended = True

    def _create_call_recorder(self, name: str) -> Any:
        """Return a hook that records whether the module `name` is called before or after the layers."""

        def record(*_: Any) -> None:
            (self._after if self._layers_ended else self._before)[name] = None

        return record


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


def create_placeholder(replaced: nn.Module) -> nn.Module:
    """Create the placeholder for a module that the span leaves out, except for the token embedding."""
    return (NoVectors if isinstance(replaced, nn.Embedding) else PassThrough)(replaced)
