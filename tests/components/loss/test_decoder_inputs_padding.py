"""
All sums and means over tokens: the same documents in longer rows have the same values and gradients.

Left out are numbers about rows by definition: FLOPs (`metrics.utilization` counts work on padding), `fill_rate`, and
Dr. GRPO's constant, the row length.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.data.pad_collator import PadCollator
from drawloom.components.loss.classification import Classifier
from drawloom.components.loss.cpo import Cpo
from drawloom.components.loss.dft import Dft
from drawloom.components.loss.distill import Distill
from drawloom.components.loss.dpo import Dpo
from drawloom.components.loss.grpo import Grpo
from drawloom.components.loss.ipo import Ipo
from drawloom.components.loss.kto import Kto
from drawloom.components.loss.next_token import NextToken
from drawloom.components.loss.orpo import Orpo
from drawloom.components.loss.reward import RewardModel
from drawloom.components.loss.simpo import SimPo
from drawloom.components.metrics.activation_rms import ActivationRms
from drawloom.components.metrics.expert_load import ExpertLoad
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.data import IGNORE_INDEX, TokenBatch, count_target_bytes
from drawloom.components.ports.rollouts import PolicyBatch
from drawloom.components.ports.run import Step
from support.doubles import FixedStages, Machine
from support.metrics import measure
from support.qwen3 import sparse, whole

LENGTH, PADDED = 8, 21
FILL = {"targets": IGNORE_INDEX, "padding": True, "tokens": 3}
"""Values of leaves in padding, if not 0."""


def make_batch(seed: int = 0) -> PolicyBatch:
    """Return two full rows of two documents, with values in all leaves."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(29, (2, 2, LENGTH), generator=generator)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]])
    targets[:, -1] = targets[0, 0] = IGNORE_INDEX
    weights = torch.rand(2, LENGTH, generator=generator).masked_fill(targets == IGNORE_INDEX, 0)
    labels = torch.zeros(2, LENGTH)
    labels[:, 0] = labels[0, 3] = labels[1, 5] = 1.0
    numbers = torch.rand(4, 2, LENGTH, generator=generator).where(weights > 0, 0)
    return PolicyBatch(
        tokens,
        targets,
        positions,
        documents,
        weights,
        reference=-numbers[0],
        labels=labels,
        teacher_ids=torch.randint(29, (2, LENGTH, 1), generator=generator),
        teacher_logps=torch.rand(2, LENGTH, 2, generator=generator).log_softmax(-1),
        padding=torch.zeros(2, LENGTH, dtype=torch.bool),
        logps=-numbers[1],
        advantages=numbers[2] - 0.5 * (weights > 0),
    )


def pad(batch: PolicyBatch, count: int) -> PolicyBatch:
    """Return the batch in longer rows, with padding as another document."""
    changes: dict[str, Any] = {}
    for name, spec, value in batch.named_tensors():
        if spec == "tokens":
            widths = (0, 0) * (value.ndim - 2) + (0, count)
            changes[name] = F.pad(value, widths, value=FILL.get(name, 0))
    changes["document_ids"][:, LENGTH:] = 2
    changes["positions"][:, LENGTH:] = torch.arange(count)
    return batch.evolve(**changes)


def with_head(loss: Any) -> Any:
    """Return a loss with a random head on the CPU."""
    assert loss.module is not None
    loss.module.to_empty(device="cpu").double()
    nn.init.normal_(loss.module.weight, generator=torch.Generator().manual_seed(5))
    return loss


LOSSES: dict[str, Callable[[Qwen3Moe, Any], Any]] = {
    "next token": lambda _model, _mesh: NextToken(z_loss=0.1, label_smoothing=0.2, accuracy=True, top_k=3),
    "dft": lambda _model, _mesh: Dft(),
    "distill": lambda _model, _mesh: Distill(reference="data", task_weight=0.3),
    "dpo": lambda _model, _mesh: Dpo(),
    "ipo": lambda _model, _mesh: Ipo(),
    "cpo": lambda _model, _mesh: Cpo(),
    "orpo": lambda _model, _mesh: Orpo(),
    "simpo": lambda _model, _mesh: SimPo(),
    "kto": lambda _model, _mesh: Kto(),
    "reward": lambda model, mesh: with_head(RewardModel(model=model, mesh=mesh, centring=0.1)),
    "classifier": lambda model, mesh: with_head(Classifier(model=model, mesh=mesh, labels=["no", "yes"])),
    "grpo": lambda _model, _mesh: Grpo(variant="grpo", beta=0.1),
    "dapo": lambda _model, _mesh: Grpo(variant="dapo", beta=0.1),
    "gspo": lambda _model, _mesh: Grpo(variant="gspo", beta=0.1),
    "cispo": lambda _model, _mesh: Grpo(variant="cispo", beta=0.1),
}


def compute_values_and_gradients(module: nn.Module, loss: Any, batch: Any) -> dict[str, Tensor]:
    """Return the loss's sums, and the gradients of the loss and the router's losses."""
    inputs, context = loss.inputs(batch)
    if isinstance(loss, Kto):
        with torch.no_grad():
            part = module(inputs, context, lambda hidden, head: loss.compute_part_of_step_sums(hidden, head, batch))
        batch = loss.with_step_sums(batch, part)
    total, weight, sums = module(inputs, context, lambda hidden, head: loss.loss(hidden, head, batch))
    gradients = torch.autograd.grad(total, list(module.parameters()), materialize_grads=True)
    named = zip((name for name, _ in module.named_parameters()), gradients, strict=True)
    return {"loss": total.detach(), "weight": weight, **sums, **dict(named)}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_counts_in_no_loss_and_no_observer(name: str, one_rank: Any) -> None:
    """
    Losses, their named sums, and gradients, also of the router's balancing and z-loss; token counts and entropies
    by router, which also move the experts' biases; activations; tokens and bytes.
    """
    torch.manual_seed(0)
    model = sparse(num_hidden_layers=2, router_aux_loss_coef=0.7, router_z_loss_coef=0.3)
    module, loss = whole(model).double(), LOSSES[name](model, one_rank)
    common: dict[str, Any] = {"stages": FixedStages([module]), "mesh": one_rank, "device": Machine()}
    observers: list[Any] = [ExpertLoad(**common, by_expert=True), ActivationRms(**common)]
    for observer in observers:
        observer.open()
    results = []
    for batch in (make_batch(), pad(make_batch(), PADDED)):
        for observer in observers:
            measure(observer, Step(1, 1))
        values: dict[str, Any] = compute_values_and_gradients(module, loss, batch)
        for observer in observers:
            values |= {key: torch.tensor(value) for key, value in measure(observer, Step(1, 1)).items()}
        values["tokens"] = torch.tensor(batch.token_count)
        values["bytes"] = count_target_bytes(batch.targets, batch.weights, torch.arange(29.0).double())
        results.append(values)
    assert results[0]["tokens"] == 2 * LENGTH and any(key.startswith("expert_tokens") for key in results[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-9)


def test_padding_on_both_sides_is_the_same_to_routers() -> None:
    """A collator may pad on the left, where the padding is the first document."""
    torch.manual_seed(0)
    model = sparse(num_hidden_layers=1, router_aux_loss_coef=0.7)
    module, examples = whole(model).double(), [{"input_ids": [3, 1, 4, 1, 5, 9]}, {"input_ids": [2, 6, 5]}]
    results = []
    for side, length in (("right", 6), ("right", 15), ("left", 15)):
        batch: Any = PadCollator(side=side).collate(examples, length)  # type: ignore[arg-type]
        assert isinstance(batch, TokenBatch) and batch.token_count == 9
        results.append(compute_values_and_gradients(module, NextToken(), batch))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=1e-9)
