"""Multi-token prediction against its formula, with a layer from transformers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import Recipe
from drawloom.components.loss.multi_token import MultiToken
from drawloom.components.ports.data import TokenBatch
from drawloom.components.weights.convert import persistent_tensors
from support.checkpoints import SingleRankMesh
from support.families import gradients
from support.qwen3 import dense, pack_documents, twin, whole

LENGTHS = [[12], [7, 5]]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def compute_by_formula(reference: Any, layers: Any, blocks: Any, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Return one document's summed cross entropies by depth, for tokens (tokens,), from equations 21 to 24."""
    embedded = reference.model.embed_tokens(tokens[None])
    hidden = reference.model(tokens[None]).last_hidden_state
    sums = [F.cross_entropy(reference.lm_head(hidden)[0], targets, reduction="sum")]
    for depth, (layer, block) in enumerate(zip(layers, blocks, strict=True), 1):
        both = [norm(embedded[:, depth:], layer.enorm.weight), norm(hidden[:, :-1], layer.hnorm.weight)]
        joined = torch.cat(both, -1) @ layer.eh_proj.weight.T
        angles = reference.model.rotary_emb(joined, torch.arange(joined.shape[1])[None])
        count = joined.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        hidden = block(joined, attention_mask=mask, position_embeddings=angles)
        logits = reference.lm_head(norm(hidden, layer.norm.weight))
        sums.append(F.cross_entropy(logits[0], targets[depth:], reduction="sum"))
    return sums


def test_losses_and_gradients_equal_the_formula() -> None:
    """Further tokens in packed documents have the formula's losses and gradients for documents alone."""
    torch.manual_seed(0)
    model = dense(tie_word_embeddings=False)
    module = whole(model)
    loss = MultiToken(model=model, mesh=SingleRankMesh(), depth=2, coefficient=0.6)
    layers: Any = loss.module
    layers.to_empty(device="cpu")
    for tensor in layers.parameters():
        nn.init.normal_(tensor, 1.0 if tensor.ndim == 1 else 0.0, 0.2)
    reference = twin(model, persistent_tensors(module))
    blocks = nn.ModuleList(type(reference.model.layers[1])(reference.config, 1) for _ in range(2))
    for own, block in zip(layers, blocks, strict=True):
        prefix = "model.layers.1."
        state = persistent_tensors(own.layer)  # Qwen3 has transformers' names
        block.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    tokens, targets = torch.randint(29, (2, 2, 12))
    shared = pack_documents(LENGTHS)
    weights = torch.ones(2, 12)
    batch = TokenBatch(
        tokens=tokens, targets=targets, positions=shared.positions, document_ids=shared.document_ids, weights=weights
    )
    inputs, context = loss.inputs(batch)
    total, weight, sums = module(inputs, context, lambda hidden, head: loss.loss(hidden, head, batch))
    documents = [
        compute_by_formula(reference, layers, blocks, *parts)
        for row, answers, lengths in zip(tokens, targets, LENGTHS, strict=True)
        for parts in zip(row.split(lengths), answers.split(lengths), strict=True)
    ]
    first, *further = (torch.stack(by_depth).sum() for by_depth in zip(*documents, strict=True))
    wanted = first + 0.6 * torch.stack(further).sum() / 2
    torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        sums["further_cross_entropy"], torch.stack(further).sum().detach() / 2, atol=1e-4, rtol=1e-5
    )
    assert weight == 24
    ours, theirs = dict(module.named_parameters()), dict(reference.named_parameters())
    for number, (own, block) in enumerate(zip(layers, blocks, strict=True)):
        ours |= {f"{number}.{name}": parameter for name, parameter in own.named_parameters()}
        outer = [f"{name}.weight" for name in ("enorm", "hnorm", "norm", "eh_proj")]
        theirs |= {f"{number}.{name}": own.get_parameter(name) for name in outer}
        theirs |= {f"{number}.layer.model.layers.1.{name}": part for name, part in block.named_parameters()}
    assert ours.keys() == theirs.keys()
    grads, expected = gradients(total, {name: ours[name] for name in theirs}), gradients(wanted, theirs)
    for name, grad, other in zip(theirs, grads, expected, strict=True):
        size = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(grad / size, other / size, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("mesh.tensor=2",), "predicts further tokens on whole rows and products"),
        (("mesh.context=2",), "predicts further tokens on whole rows and products"),
        (
            ("mesh.pipeline=2", "schedule.use=pipeline.schedules.circular", "executor.use=pipeline.circular.executor"),
            "the circular pipeline passes only hidden states",
        ),
        (("model.use=model.gemma4", "model.hidden_size_per_layer_input=8"), "which can't run alone"),
    ],
)
def test_check_refuses_what_extra_layers_can_not_do(words: tuple[str, ...], text: str) -> None:
    """Split rows or products, circular pipelines and linked layers are problems in the recipe."""
    graph = Recipe.load("first_run", "loss.use=loss.multi_token", *words).graph
    assert any(text in problem.text for problem in graph.errors), graph.errors
