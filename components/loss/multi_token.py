"""Multi-token prediction (MTP): extra layers predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, above, between, component, setting
from drawloom.components.loss.next_token import NextToken
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.safetensors.writer import format_names
from drawloom.components.storage.tensor_source import TensorSource
from drawloom.components.weights.heads import find_model_folder
from drawloom.components.weights.load import (
    find_wrong_shapes,
    open_dequantized_source,
    persistent_tensors,
    stream_converted_tensors,
)
from drawloom.components.weights.mapper import parallel, select_outputs, sequential
from drawloom.ports import (
    LOSS,
    BufferOwner,
    ConfigJson,
    CountsFlops,
    ForwardFlops,
    Head,
    HiddenStates,
    LanguageModel,
    LayerRange,
    LossSums,
    Mapper,
    Mesh,
    SplitModel,
    TensorGroup,
    TensorSlice,
    TokenBatch,
    TokenContext,
    embeds_on_every_rank,
)

MAX_DEPTH = 16


class PredictionLayer(nn.Module):
    """One more layer like a model's last, on projected hidden states and embeddings."""

    def __init__(self, model: LanguageModel, width: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        count = model.num_hidden_layers
        self.layer = model.build(LayerRange(count - 1, count, embedding=False, head=False))

    def forward(self, hidden: Tensor, embedded: Tensor, context: TokenContext) -> Tensor:
        """Map hidden states (rows, length, width) and the next tokens' embeddings, in this shape, to hidden states."""
        hidden, embedded = (x.to(self.eh_proj.weight.dtype) for x in (hidden, embedded))
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        output: Tensor = self.layer(joined, context)
        return output


OUTER_NAMES = {
    "enorm": ("enorm", "mtp.pre_fc_norm_embedding"),
    "hnorm": ("hnorm", "mtp.pre_fc_norm_hidden"),
    "eh_proj": ("eh_proj", "mtp.fc"),
    "norm": ("shared_head.norm", "mtp.norm"),
}
"""DeepSeek's and Qwen's names by a PredictionLayer's module."""


def create_layer_mapper(model: LanguageModel, depth: int) -> Mapper:
    """
    Return the mapper from the extra layers' parameters to tensors in published folders; empty if these have none.

    Known are DeepSeek's names, `model.layers.N.*` behind the last layer, and Qwen's, `mtp.*`, for one layer.
    """
    whole, count = model.hugging_face_mapper(), model.num_hidden_layers
    has_one = "mtp.*" in whole.ignored and str(model.hugging_face_config()["model_type"]).startswith("qwen3")
    if depth > 1 if has_one else f"model.layers.{count}.*" not in whole.ignored:
        return Mapper(())
    last, mappers = f"model.layers.{count - 1}.", []
    for number in range(depth):
        own, inner = f"{LOSS}.{number}.", "mtp.layers.0." if has_one else f"model.layers.{count + number}."
        for name, (published, qwen) in OUTER_NAMES.items():
            # Qwen's norms multiply by 1 + weight.
            offset, target = float(has_one and name != "eh_proj"), qwen if has_one else inner + published
            both = partial(_add, number=-offset), partial(_add, number=offset)
            mappers.append(Mapper((TensorGroup((f"{own}{name}.weight",), (f"{target}.weight",), *both),)))
        for group in whole.groups:
            if group.inputs[0].startswith(last):
                inputs = [f"{own}layer.{name}" for name in group.inputs]
                outputs = [inner + name.removeprefix(last) for name in group.outputs]
                mappers.append(Mapper((attrs.evolve(group, inputs=tuple(inputs), outputs=tuple(outputs)),)))
    return parallel(*mappers)


def _repeat(tensors: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """Return a tensor (...) several times."""
    return [*tensors] * count


def _add(tensors: Sequence[Tensor], number: float) -> Sequence[Tensor]:
    """Return the tensors (...) plus a number."""
    return [tensor + number for tensor in tensors]


@component
class MultiToken(NextToken):
    """
    Cross entropy for the next token and, by extra layers on the last hidden states, for `depth` tokens after it.

    Embedding and head are the model's. The extra layers are trained in `precision.parameter`; every rank has them, with
    its part of the experts. Exports have them if published folders of the model's family do (DeepSeek, GLM, Qwen3-Next,
    Qwen3.5). Beside the sums in `loss.next_token` there is `further_cross_entropy`, a mean over depths.
    """

    model: LanguageModel
    mesh: Mesh
    depth: int = setting("further tokens to predict, by a layer for one", default=1, check=between(1, MAX_DEPTH + 1))
    coefficient: float = setting("multiplier for the further tokens' mean cross entropy", default=0.3, check=above(0))
    layers: Path | None = setting(
        "model folder with initial values for the extra layers, such as the model's own; default: random", default=None
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report ranks along `tensor` or `context`, circular pipelines, and last layers with links to others."""
        mesh, model = map(node.neighbour, ("mesh", "model"))
        for dimension in ("tensor", "context"):
            if mesh is not None and mesh.settings.get(dimension, 1) != 1:
                text = f"[{node.name}] predicts further tokens on whole rows and products"
                yield mesh.problem(dimension, text, f"write {dimension} = 1")
        if any(embeds_on_every_rank(other.spec.cls) for other in node.nodes.values()):
            text = "the circular pipeline passes only hidden states, and further tokens need embeddings, too"
            yield node.problem("use", text, "write use = 'loss.next_token', or use another schedule")
        if model is not None and model.settings.get("residual", "plain") != "plain":
            text = f"[{node.name}] continues one residual stream, and the model has several"
            yield model.problem("residual", text, 'write "plain", or another loss')
        if model is not None and issubclass(model.component, SplitModel):
            for fault in model.component.find_split_faults(model, "pipeline", 2):
                text = f"[{node.name}] has layers like the model's last one, which can't run alone: {fault}"
                yield node.problem("use", text, "write use = 'loss.next_token'")
        if node.settings["layers"] is None and (folder := find_model_folder(node)) is not None:
            with suppress(UserError):  # the folder is reported elsewhere
                names = open_safetensors_folder(folder).specs()
                if any(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in names):
                    text = f"{folder} has layers for further tokens, and these begin with random weights"
                    yield node.warning("layers", text, f'write layers = "{folder}" to train them further')

    def check_before_open(self) -> None:
        """Raise UserError if the folder `layers` has no such layers."""
        if self.layers is not None:
            _ = self._source

    @cached_property
    def _mapper(self) -> Mapper:
        return create_layer_mapper(self.model, self.depth)

    @cached_property
    def _source(self) -> TensorSource:
        """The tensors in the folder `layers`. Raises UserError if tensors are missing or have other shapes."""
        assert self.layers is not None and self.module is not None
        mapper, wrong = self._mapper.inverse(), []
        if not mapper.groups:
            kind, many = self.model.hugging_face_config().get("model_type"), "" if self.depth == 1 else f" {self.depth}"
            wrong = [f"folders of the type {kind} have no{many} layers for further tokens"]
        source = open_dequantized_source(self.layers, mapper)
        specs = source.specs()
        if missing := [name for name in mapper.inputs if name not in specs]:
            wrong.append(f"missing {format_names(missing)}")
        shapes = {f"{LOSS}.{name}": tuple(x.shape) for name, x in persistent_tensors(self.module).items()}
        if wrong := [*wrong, *find_wrong_shapes(mapper, specs, shapes)]:
            text = f"layers: {self.layers} does not fit the extra layers: {'; '.join(wrong)}"
            raise UserError(f"{text}; leave layers out to begin with random ones", 2)
        return source

    def _fill_module(
        self, path: str, owner: nn.Module, shapes: Mapping[str, torch.Size], reset: Callable[[], None] | None
    ) -> None:
        """Fill a module in the extra layers from the folder, or like the model's, seeded by torch's generator."""
        if reset is not None:
            reset()
        if self.layers is None:
            for name, parameter in owner.named_parameters(recurse=False) if ".layer." in path else ():
                shape, inner = shapes[name], f"{path.partition('.layer.')[2]}.{name}"
                first = self.mesh.indices.expert * len(parameter) % shape[0]
                part = TensorSlice(shape, (first, *[0] * (len(shape) - 1)), parameter.shape)
                self.model.initialize_parameter(inner, parameter, torch.initial_seed(), part)
            return
        own = {f"{LOSS}.{path}.{name}": tensor for name, tensor in owner.state_dict().items() if "." not in name}
        for name, tensor in stream_converted_tensors(self._source, select_outputs(self._mapper.inverse(), own)):
            parts = tensor.reshape(-1, *own[name].shape)  # ranks' experts
            own[name].copy_(parts[self.mesh.indices.expert % len(parts)])

    @cached_property
    def module(self) -> nn.Module | None:
        """The extra layers, on the meta device until the stages are materialized."""
        config = self.model.hugging_face_config()
        if not isinstance(width := config.get("hidden_size"), int):
            raise UserError("further tokens need hidden_size, but the model's config.json has no such key", 2)
        with torch.device("meta"):
            eps = config.get("rms_norm_eps", 1e-6)
            module = nn.ModuleList([PredictionLayer(self.model, width, eps) for _ in range(self.depth)])
        # Materializing the stages calls every module's reset_parameters. Ours fills it from `layers`, or like the
        # model's layers.
        for path, owner in module.named_modules():
            reset = owner.reset_parameters if isinstance(owner, BufferOwner) else None
            shapes = {name: tensor.shape for name, tensor in owner.named_parameters(recurse=False)}
            owner.reset_parameters = partial(self._fill_module, path, owner, shapes, reset)
        return module

    def count_forward_flops(self, model: CountsFlops) -> ForwardFlops:
        count, whole = self.model.num_hidden_layers, model.forward_flops()
        further = model.forward_flops(LayerRange(count - 1, count, embedding=False, head=True))
        by_parameter = defaultdict(float, whole.by_parameter)
        layers: Any = self.module
        for number, layer in enumerate(layers):
            by_parameter[f"{LOSS}.{number}.eh_proj.weight"] = 2.0 * layer.eh_proj.weight.numel()
            for name, flops in further.by_parameter.items():
                by_parameter[f"{LOSS}.{number}.layer.{name}" if ".layers." in name else name] += flops
        pairs = {key: flops + self.depth * further.per_pair.get(key, 0.0) for key, flops in whole.per_pair.items()}
        return ForwardFlops(by_parameter, pairs, whole.per_token + self.depth * further.per_token)

    def extend_export(self, mapper: Mapper, config: ConfigJson) -> Mapper:
        if not self._mapper.groups:
            return mapper
        text: ConfigJson = config.get("text_config", config)
        is_renamed = str(text.get("model_type")).startswith("qwen3_5")
        text["mtp_num_hidden_layers" if is_renamed else "num_nextn_predict_layers"] = self.depth
        # DeepSeek's folders repeat embedding and head.
        names = [name.removesuffix("enorm.weight") for name in self._mapper.outputs if name.endswith(".enorm.weight")]
        for name, copy in (("model.embed_tokens.weight", "embed_tokens"), ("lm_head.weight", "shared_head.head")):
            if names and name in mapper.outputs:
                targets = (name, *(f"{layer}{copy}.weight" for layer in names))
                group = TensorGroup((name,), targets, partial(_repeat, count=len(targets)))
                mapper = sequential(mapper, Mapper((group,)))
        return parallel(mapper, self._mapper)

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        """Return token ids, int64 (rows, length), and a context with a request for their embeddings."""
        tokens, context = super().inputs(batch)
        return tokens, attrs.evolve(context, hidden_states=HiddenStates((0,)))

    def loss(self, hidden: Any, head: Head, batch: TokenBatch) -> LossSums:
        """Return the loss sum, the token weight sum, and named sums; hidden are last hidden states and embeddings."""
        state, embedded = hidden[0], hidden[1][0]
        total, weight, sums = super().loss(state, head, batch)
        _, context = super().inputs(batch)
        further: Any = 0.0
        layers: Any = self.module
        for depth, layer in enumerate(layers, 1):
            # Tokens without a target so far ahead in their document get other targets, and no weight.
            next_embedded, targets, weights, documents = (
                x.roll(-depth, 1) for x in (embedded, batch.targets, batch.weights, batch.document_ids)
            )
            weights = weights * (documents == batch.document_ids)
            weights[:, -depth:] = 0.0
            state = layer(state, next_embedded, context)
            normed = layer.norm(state).to(hidden[0].dtype)
            further = further + head.token_losses(normed, targets.contiguous(), weights)[0].sum() / self.depth
        return total + self.coefficient * further, weight, {**sums, "further_cross_entropy": further.detach()}
