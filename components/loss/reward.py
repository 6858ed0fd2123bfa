"""
Reward model: a score per answer, higher for a pair's chosen answer.

The loss is that of Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv 2203.02155, equation 1; with a margin as in
Touvron et al. 2023, "Llama 2", arXiv 2307.09288, equation 2, and with centred scores as in Eisenstein et al. 2023,
arXiv 2312.09244, equation 2.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, at_least, component, setting
from drawloom.components.loss.pairwise import PairInputs, sum_by_answer
from drawloom.components.weights.heads import find_model_folder, find_score_head_rows, read_score_head
from drawloom.components.weights.load import convert_tensors
from drawloom.components.weights.mapper import distribute_like
from drawloom.graph import component_base_class
from drawloom.ports import SCORE, Head, LanguageModel, LossSums, Mesh, TokenBatch


class ScoreHead(nn.Module):
    """
    A linear layer without bias from hidden states to `outputs`, in float32.

    Its weight, (outputs, width), comes from a `folder` with such a head, or is random.
    """

    def __init__(self, width: int, outputs: Sequence[str] = ("reward",), folder: Path | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(outputs), width))
        self.outputs, self.folder = outputs, folder

    def reset_parameters(self) -> None:
        """
        Read the weight, or fill it with normal random numbers with standard deviation 1 / sqrt(width + 1).

        Raises UserError if the folder has no such head.
        """
        with torch.no_grad():
            if self.folder is None:
                self.weight.normal_(std=(self.weight.shape[1] + 1) ** -0.5)
            else:
                weight = read_score_head(self.folder, self.outputs, self.weight.shape[1]).to(
                    self.weight.device, self.weight.dtype
                )
                # With FSDP the parameter is a DTensor, and takes this rank's slice of the whole weight.
                self.weight.copy_(convert_tensors(distribute_like(SCORE, self.weight), {SCORE: weight})[SCORE])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return outputs (..., outputs), at least float32, from hidden states (..., width)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(dtype) @ self.weight.to(dtype).T


@component_base_class
class ScoringLoss:
    """Base class for losses with a head; a document has the scores at its last token."""

    output_names: ClassVar[Sequence[str]] = ("reward",)

    model: LanguageModel
    mesh: Mesh
    head: Path | None = setting(
        "model folder with the initial head, such as an export of a run with this loss, whose outputs have the same "
        "names, in any order; default: random",
        default=None,
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report other labels than the data's, and tensor parallelism; warn of a random head beside a folder's."""
        names = node.settings.get("labels")
        for other in node.nodes.values():
            others = other.settings.get("labels")
            if names and isinstance(others, list) and others != names:
                yield node.problem("labels", f"labels differ from [{other.name}]'s", "write the same in the same order")
        if (mesh := node.neighbour("mesh")) and mesh.settings.get("tensor", 1) != 1:
            # Every rank would add the whole head's gradient.
            text = f"[{node.name}] computes whole scores, and ranks along 'tensor' share hidden states"
            yield mesh.problem("tensor", text, "write tensor = 1")
        if node.settings["head"] is None and (folder := find_model_folder(node)) is not None:
            with suppress(UserError):  # there is no such head, or the folder is reported elsewhere
                find_score_head_rows(folder, names or cls.output_names)
                text = f"{folder} has a head with these outputs, and this one begins with random weights"
                yield node.warning("head", text, f'write head = "{folder}" to train it further')

    def check_before_open(self) -> None:
        """Raise UserError if the folder `head` has no such head."""
        if self.head is not None:
            find_score_head_rows(self.head, self.output_names)

    @cached_property
    def module(self) -> nn.Module | None:
        """The head's parameters, on the meta device until the stages are materialized."""
        width = self.model.hugging_face_config().get("hidden_size")
        if not isinstance(width, int):
            raise UserError("a score needs hidden_size, but the model's config.json has no such key", 2)
        with torch.device("meta"):
            return ScoreHead(width, self.output_names, self.head)

    def score_tokens(self, hidden: Tensor) -> Tensor:
        assert self.module is not None
        scores: Tensor = self.module(hidden)
        return scores


@component
class RewardModel(ScoringLoss, PairInputs):
    """
    Reward model: -log(sigmoid(margin)) of every pair of answers, where the margin is the difference of their scores.

    The score of an answer is a linear function of the hidden state at the document's last token. The data may have a
    `margin` for each pair, by which the chosen answer's score is to exceed the other one. Named sums, weighted by pair
    like the loss, are `reward_margin`, `reward_accuracy`, `reward_chosen` and `reward_rejected`.
    """

    pairs: ClassVar[bool] = True

    centring: float = setting(
        "coefficient of the squared sum of both scores, which keeps them around 0", default=0.0, check=at_least(0)
    )

    def loss(self, hidden: Tensor, head: Head, batch: TokenBatch) -> LossSums:
        """Return the sum of losses, the sum of pair weights, and named sums; hidden is (rows, length, hidden_size)."""
        documents = batch.document_ids
        rewards = sum_by_answer(self.score_tokens(hidden)[..., 0] * mark_last_tokens(documents), documents)
        weights = sum_by_answer(batch.weights, documents).sum(-1)
        chosen, rejected = rewards.unbind(-1)
        margins = 0.0 if batch.labels is None else sum_by_answer(batch.labels, documents)[..., 0]
        losses = F.softplus(margins + rejected - chosen)  # softplus(-x) is -log(sigmoid(x))
        if self.centring:
            losses = losses + self.centring * (chosen + rejected).square()
        with torch.no_grad():
            values = {
                "margin": chosen - rejected,
                "accuracy": (chosen > rejected).double() + (chosen == rejected).double() / 2,
                "chosen": chosen,
                "rejected": rejected,
            }
            sums = {f"reward_{name}": (value * weights).sum() for name, value in values.items()}
        return (losses * weights).sum(), weights.sum(), sums


def mark_last_tokens(documents: Tensor) -> Tensor:
    """Return where a document ends, from document ids int64 (rows, length): bool (rows, length)."""
    last = torch.ones_like(documents[:, :1], dtype=torch.bool)  # the end of a row
    return torch.cat([documents[:, 1:] != documents[:, :-1], last], 1)
