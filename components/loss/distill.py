"""
Distillation: learn a teacher's predictions of the next token.

With a teacher model, the divergence is over the whole vocabulary. In stored predictions, the teacher's k likeliest
tokens and the rest of the vocabulary are k + 1 outcomes, and so are they for the student: this divergence is a lower
bound of the one over the vocabulary, and 0 for equal models. (A renormalised top k would make the teacher look surer
than it is.) Forward KL divergence and temperature: Hinton et al. 2015, arXiv 1503.02531, section 2; reverse: Gu et al.
2023, "MiniLLM", arXiv 2306.08543; generalised Jensen-Shannon divergence: Agarwal et al. 2023, arXiv 2306.13649.
"""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from drawloom import NodeView, Problem, UserError, above, between, component, internal, setting, wired
from drawloom.components.loss.decoder_inputs import DecoderInputs
from drawloom.ports import Head, LossSums, TokenBatch, Tokenizer

Divergence = Literal["forward", "reverse", "jsd"]


@component
class Distill(DecoderInputs):
    """
    Divergence from a teacher's predictions by token, mixed with the cross entropy of the data.

    `forward` is KL(teacher || student), which covers all that the teacher finds likely; `reverse` is KL(student ||
    teacher), which avoids what it finds unlikely; `jsd` is beta KL(teacher || M) + (1 - beta) KL(student || M) for the
    mixture M = beta teacher + (1 - beta) student. Both models' logits are computed chunk by chunk, and again in the
    backward pass; a teacher model's last hidden states wait for the loss on the last stage. Named sums are `divergence`
    and `cross_entropy`; the latter costs a product with the head if `task_weight` is 0.

    The divergence is over the tokenizer's ids: padding rows of either model's vocabulary are in neither softmax.
    """

    batch_leaves: ClassVar[tuple[str, ...]] = (*DecoderInputs.batch_leaves, "teacher_ids", "teacher_logps")

    tokenizer: Tokenizer | None = wired(default=None)
    reference: Literal["model", "data"] = setting(
        "teacher: the recipe's frozen model, or predictions in the data (`drawloom teacher-logps`)", default="model"
    )
    divergence: Divergence = setting("divergence between teacher and student", default="forward")
    temperature: float = setting(
        "divisor of both models' logits in the divergence, which is multiplied by its square",
        default=1.0,
        check=above(0),
    )
    beta: float | None = setting(
        "share of the teacher in the mixture of `jsd`, above 0; default: 0.5", default=None, check=between(0, 1)
    )
    task_weight: float = setting(
        "share of the data's cross entropy in the loss; the rest is the divergence", default=0.0, check=between(0, 1)
    )

    _teacher_head: Head | None = internal(None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report `beta` without `jsd`, a `beta` for which all divergences are 0, and a temperature without logits."""
        if node.settings["reference"] == "data" and node.settings["temperature"] != 1:
            text = "stored predictions have the temperature 1"
            yield node.problem("temperature", text, 'leave it out, or write reference = "model" with a frozen model')
        beta, kind = node.settings["beta"], node.settings["divergence"]
        if beta is not None and kind != "jsd":
            yield node.problem(
                "beta", f"beta has no effect with divergence = {kind!r}", 'leave it out, or write divergence = "jsd"'
            )
        elif beta == 0:
            text = "the divergence is 0 for all models without a teacher in the mixture"
            yield node.problem("beta", text, 'write divergence = "forward", which is the limit')

    def reference_values(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        """Return the teacher's last hidden states (rows, length, width), and keep its head for the step's losses."""
        self._teacher_head = head
        return hidden

    def with_reference(self, batch: TokenBatch, values: Tensor) -> TokenBatch:
        return batch.evolve(teacher_states=values)

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the loss sum, the token weight sum, and named sums; hidden is (rows, length, hidden_size)."""
        divergence = (self._compute_token_divergences(hidden, head, batch) * batch.weights).sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.task_weight > 0):
            task = head.token_losses(hidden, batch.targets, batch.weights)[0].sum()
        sums = {"divergence": divergence.detach(), "cross_entropy": task.detach()}
        total = divergence if not self.task_weight else (1 - self.task_weight) * divergence + self.task_weight * task
        return total, batch.weights.double().sum(), sums

    def _compute_token_divergences(self, hidden: Tensor, head: Head, batch: TokenBatch) -> Tensor:
        """Return the divergence by token, at least float32 (rows, length)."""
        kind, beta = self.divergence, 0.5 if self.beta is None else self.beta
        ids = None if self.tokenizer is None else self.tokenizer.vocab_size
        if self.reference == "model":
            if self._teacher_head is None or batch.teacher_states is None:
                raise UserError('the batch has no teacher; add a node with use = "stages.frozen"', 2)
            teacher, temperature = self._teacher_head, self.temperature
            whole = partial(
                compute_full_vocabulary_divergence,
                head=teacher,
                temperature=temperature,
                kind=kind,
                beta=beta,
                id_count=ids,
            )
            return head.map_logits(whole, hidden, batch.teacher_states)
        if batch.teacher_ids is None or batch.teacher_logps is None:
            raise UserError('the rows contain no teacher predictions; write teacher = "@teacher" in the packing', 2)
        coarse = partial(compute_top_k_divergence, kind=kind, beta=beta, id_count=ids)
        return head.map_logits(coarse, hidden, batch.teacher_ids, batch.teacher_logps)


def compute_full_vocabulary_divergence(
    logits: Tensor,
    teacher_states: Tensor,
    head: Head,
    temperature: float,
    kind: Divergence,
    beta: float,
    id_count: int | None = None,
) -> Tensor:
    """
    Return a divergence over the first `id_count` ids, at least float32 (tokens,), times the temperature's square.

    logits: (tokens, vocab_size); teacher_states: the last hidden states (tokens, width) for the teacher's `head`.
    `id_count` is the tokenizer's id count, if known.
    """
    with torch.no_grad():
        teacher_logits = head.logits(teacher_states)[..., :id_count]
    logits = logits[..., :id_count]
    if teacher_logits.shape != logits.shape:
        sizes = f"{teacher_logits.shape[-1]} ids, and the student {logits.shape[-1]}"
        raise UserError(f"the teacher's vocabulary has {sizes}; use models with one tokenizer", 2)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    teacher, student = ((part.to(dtype) / temperature).log_softmax(-1) for part in (teacher_logits, logits))
    return temperature**2 * _compute_divergence(teacher, student, kind, beta)


def compute_top_k_divergence(
    logits: Tensor, ids: Tensor, teacher_logps: Tensor, kind: Divergence, beta: float, id_count: int | None = None
) -> Tensor:
    """
    Return a divergence over k tokens and the rest of the first `id_count` ids, at least float32 (tokens,).

    logits: (tokens, vocab_size); ids: int64 (tokens, k); teacher_logps: float32 (tokens, k + 1), the rest last. If k is
    `id_count`, or without it the vocabulary's size, there is no rest.
    """
    logits = logits[..., :id_count].to(torch.promote_types(logits.dtype, torch.float32))
    normalizer = logits.logsumexp(-1, keepdim=True)
    student = logits.gather(-1, ids) - normalizer
    teacher = teacher_logps.to(logits.dtype)
    if ids.shape[-1] < logits.shape[-1]:
        rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        student = torch.cat([student, rest - normalizer], -1)
    else:
        teacher = teacher[..., :-1]
    teacher = teacher.log_softmax(-1)  # rounded numbers may not add up to 1
    return _compute_divergence(teacher, student, kind, beta)


def _compute_divergence(teacher: Tensor, student: Tensor, kind: Divergence, beta: float) -> Tensor:
    """Return a divergence (tokens,) from log-probabilities (tokens, outcomes)."""
    if kind == "forward":
        return _compute_kl_of_logps(teacher, student)
    if kind == "reverse":
        return _compute_kl_of_logps(student, teacher)
    shares = torch.tensor([beta, 1 - beta], dtype=student.dtype, device=student.device).log()
    mixture = torch.logaddexp(teacher + shares[0], student + shares[1])
    return beta * _compute_kl_of_logps(teacher, mixture) + (1 - beta) * _compute_kl_of_logps(student, mixture)


def _compute_kl_of_logps(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one || other), (tokens,), from log-probabilities (tokens, outcomes)."""
    return (one.exp() * (one - other)).sum(-1)
