"""Distillation from a teacher's likeliest tokens."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.components.loss.distill import Distill
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.data import TokenBatch
from drawloom.graph import UserError
from drawloom.testing import fake
from support.losses import Sample, sample

VOCAB = 11


def make_case(top_k: int, scale: float = 1.0) -> tuple[Sample, TokenBatch, Tensor]:
    """A student, its batch with the teacher's k likeliest tokens, and all of the teacher's log-probabilities."""
    case = sample()
    drift = torch.randn(3, 5, VOCAB, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    teacher = (case.logits().detach() + scale * drift).log_softmax(-1)
    top = teacher.topk(top_k)
    rest = teacher.scatter(-1, top.indices, -torch.inf).logsumexp(-1, keepdim=True).clamp_min(-1e4)
    logps = torch.cat([top.values, rest], -1)
    return case, case.batch.evolve(teacher_ids=top.indices, teacher_logps=logps), teacher


def kl(one: Tensor, other: Tensor) -> Tensor:
    return F.kl_div(other, one, log_target=True, reduction="none").sum(-1)


def jsd(teacher: Tensor, student: Tensor) -> Tensor:
    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    return 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)


def make_taught(temperature: float, scale: float = 1.0, **options: Any) -> tuple[Sample, TokenBatch, Distill, Tensor]:
    """A student, its batch and loss with a teacher model of another width, and the teacher's logits."""
    case, generator = sample(), torch.Generator().manual_seed(9)
    drift = scale * torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
    rows = torch.randn(VOCAB, 3, generator=generator, dtype=torch.float64)
    states = torch.cat([case.hidden.detach(), drift], -1)
    teacher = attrs.evolve(case, hidden=states, weight=torch.cat([case.weight.detach(), rows], -1))
    loss = Distill(temperature=temperature, **options)
    batch = loss.with_reference(case.batch, loss.reference_values(states, teacher.head(), case.batch))
    return case, batch, loss, teacher.logits()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_teacher_model_gives_the_divergence_over_the_vocabulary(kind: Any, temperature: float) -> None:
    """Loss and gradients are torch's, at the temperature and times its square; equal models have none."""
    options = {"divergence": kind, "beta": 0.3 if kind == "jsd" else None}
    case, batch, loss, teacher = make_taught(temperature, **options)
    total, weight, _ = loss.loss(case.hidden, case.head(), batch)
    parts = ((logits / temperature).log_softmax(-1) for logits in (teacher, case.logits()))
    expected = temperature**2 * (DIVERGENCES[kind][1](*parts) * batch.weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=0)
    assert float(weight) == float(batch.weights.double().sum())
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    case, batch, loss, _ = make_taught(temperature, scale=0.0, **options)
    total, _, _ = loss.loss(case.hidden, case.head(), batch)
    assert abs(float(total.detach())) < 1e-9 and float(torch.autograd.grad(total, case.hidden)[0].abs().max()) < 1e-9


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("reference", ["model", "data"])
def test_padding_rows_of_either_vocabulary_are_in_neither_softmax(kind: Any, reference: Any) -> None:
    """
    With 9 ids in the tokenizer, a table of 14 rows and one of 11 have the divergence of the first 9 rows of both.

    The padding rows get no gradient. This also holds for stored predictions, by top 3 and the rest.
    """
    ids, beta = 9, 0.3 if kind == "jsd" else None
    tokenizer = fake(Tokenizer, vocab_size=ids)
    case, batch, loss, logits = make_taught(1.0, divergence=kind, beta=beta, tokenizer=tokenizer)
    teacher = logits[..., :ids].log_softmax(-1)
    student = case.logits()[..., :ids].log_softmax(-1)
    assert loss._teacher_head is not None
    if reference == "model":
        padded = attrs.evolve(case, weight=F.pad(loss._teacher_head.weight, (0, 0, 0, 3), value=9.0))  # type: ignore[attr-defined]
        loss.reference_values(case.hidden, padded.head(), batch)
    else:
        top = teacher.topk(3).indices
        teacher, student = (torch.cat([part.gather(-1, top), rest_of(part, top)], -1) for part in (teacher, student))
        batch = batch.evolve(teacher_ids=top, teacher_logps=teacher)
        loss = Distill(reference="data", divergence=kind, beta=beta, tokenizer=tokenizer)
    expected = (DIVERGENCES[kind][1](teacher, student) * batch.weights).sum()
    total, _, _ = loss.loss(case.hidden, case.head(), batch)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=0)
    ours, theirs = (torch.autograd.grad(value, (case.hidden, case.weight)) for value in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    assert not ours[1][ids:].any()


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    """Without a tokenizer, nothing says which ids are padding. The message has both sizes."""
    case, batch, loss, _ = make_taught(1.0)
    small = attrs.evolve(case, weight=case.weight[:-1])
    with pytest.raises(UserError, match="the teacher's vocabulary has 11 ids, and the student 10"):
        loss.loss(small.hidden, small.head(), batch)


DIVERGENCES: dict[str, tuple[Distill, Callable[[Tensor, Tensor], Tensor]]] = {
    "forward": (Distill(reference="data"), kl),
    "reverse": (Distill(reference="data", divergence="reverse"), lambda teacher, student: kl(student, teacher)),
    "jsd": (Distill(reference="data", divergence="jsd", beta=0.3), jsd),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [3, VOCAB])
def test_loss_and_gradients_are_the_divergence(kind: str, top_k: int) -> None:
    """
    The weighted sum is torch's divergence over k tokens and the rest, or over the whole vocabulary if k is all of it.
    """
    case, batch, teacher = make_case(top_k)
    loss, formula = DIVERGENCES[kind]
    total, weight, sums = loss.loss(case.hidden, case.head(), batch)
    student = case.logits().log_softmax(-1)
    assert batch.teacher_ids is not None
    if top_k < VOCAB:
        teacher, student = (
            torch.cat([part.gather(-1, batch.teacher_ids), rest_of(part, batch.teacher_ids)], -1)
            for part in (teacher, student)
        )
    expected = (formula(teacher, student) * batch.weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(sums["divergence"], expected.detach())
    assert float(weight) == float(batch.weights.double().sum())
    inputs = case.hidden, case.weight
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def rest_of(logps: Tensor, ids: Tensor) -> Tensor:
    return torch.log1p(-logps.gather(-1, ids).exp().sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [3, VOCAB])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(kind: str, top_k: int) -> None:
    """The divergence and its gradient are 0."""
    case, batch, _ = make_case(top_k, scale=0.0)
    total, _, _ = DIVERGENCES[kind][0].loss(case.hidden, case.head(), batch)
    (gradient,) = torch.autograd.grad(total, case.hidden)
    assert abs(float(total.detach())) < 1e-9 and float(gradient.abs().max()) < 1e-9


def test_fewer_tokens_give_a_lower_bound_and_a_certain_teacher_the_cross_entropy() -> None:
    """A coarser divergence is smaller; with one certain token it is the cross entropy of that token."""
    case, batch, _ = make_case(2)
    coarse = Distill(reference="data").loss(case.hidden, case.head(), batch)[0]
    case, whole, _ = make_case(VOCAB)
    assert (
        0 < float(coarse.detach()) < float(Distill(reference="data").loss(case.hidden, case.head(), whole)[0].detach())
    )
    ids = batch.targets.clamp_min(0)[..., None]
    certain = torch.tensor([0.0, -1e4]).expand(3, 5, 2)
    total, _, sums = Distill(reference="data").loss(
        case.hidden, case.head(), batch.evolve(teacher_ids=ids, teacher_logps=certain)
    )
    torch.testing.assert_close(total.detach(), sums["cross_entropy"], rtol=1e-6, atol=1e-9)


def test_symmetric_mixtures_do_not_distinguish_teacher_and_student() -> None:
    """With half of each, exchanging both leaves the divergence as it is."""
    case, batch, teacher = make_case(VOCAB)
    loss = Distill(reference="data", divergence="jsd")
    total = loss.loss(case.hidden, case.head(), batch)[0]
    student = case.logits().log_softmax(-1)
    expected = (symmetric(student, teacher) * batch.weights).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(expected, (symmetric(teacher, student) * batch.weights).sum())


def symmetric(one: Tensor, other: Tensor) -> Tensor:
    mixture = torch.logaddexp(one, other) - torch.tensor(2.0).double().log()
    return (kl(one, mixture) + kl(other, mixture)) / 2


def test_the_task_has_its_share_of_the_loss() -> None:
    """The total is the weighted mean of divergence and cross entropy, whose gradient it has then."""
    case, batch, _ = make_case(3)
    total, _, sums = Distill(reference="data", task_weight=0.25).loss(case.hidden, case.head(), batch)
    torch.testing.assert_close(total.detach(), 0.75 * sums["divergence"] + 0.25 * sums["cross_entropy"])
    alone = Distill(reference="data").loss(case.hidden, case.head(), batch)[0]
    gradients = [torch.autograd.grad(value, case.hidden)[0] for value in (total, alone)]
    assert not torch.allclose(gradients[0], 0.75 * gradients[1])


def test_rows_without_a_teacher_are_refused() -> None:
    """The message names the missing edge."""
    case, batch, _ = make_case(3)
    missing: Any = {"teacher_ids": None}
    with pytest.raises(UserError, match='write teacher = "@teacher" in the packing'):
        Distill(reference="data").loss(case.hidden, case.head(), batch.evolve(**missing))
