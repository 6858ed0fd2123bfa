"""The length curriculum."""

import torch

from drawloom.components.data.loader import LengthStage, split_long_documents
from drawloom.components.ports.data import TokenBatch


def test_documents_are_cut_and_no_token_is_lost() -> None:
    """After every `length` tokens a new document begins with position 0; all else is the same."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2], [0] * 8])
    tokens = torch.arange(16).reshape(2, 8)
    batch = TokenBatch(tokens, tokens + 1, positions, documents, torch.ones(2, 8))
    shorter = split_long_documents(batch, 3)
    assert shorter.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0], [0, 1, 2, 0, 1, 2, 0, 1]]
    assert shorter.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 1, 1, 1, 2, 2]]
    assert all(getattr(shorter, name) is getattr(batch, name) for name in ("tokens", "targets", "weights"))
    assert torch.equal(split_long_documents(batch, 8).document_ids, documents)


def test_a_stage_ends_at_a_step_or_after_tokens() -> None:
    """A stage ends with the named step, or with the step that reaches the number of tokens."""
    assert [LengthStage(length=2, until_step=3).has_not_ended_at(step, 0) for step in (1, 3, 4)] == [True, True, False]
    assert [LengthStage(length=2, until_tokens=64).has_not_ended_at(9, tokens) for tokens in (0, 63, 64)] == [
        True,
        True,
        False,
    ]
