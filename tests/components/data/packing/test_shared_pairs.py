"""Rows of pairs whose common beginning stands once; `tests/runs/test_preferences.py` compares gradients."""

import numpy as np
import torch

from drawloom.components.data.packing.batches import build_batch
from drawloom.components.data.packing.pieces import RowPiece
from drawloom.components.data.packing.shared_pairs import share_prompts
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.loss.pairwise import sum_by_answer
from drawloom.components.ports.data import TokenBatch
from drawloom.kernels.attention.tree import create_tree_mask

ROWS, PAIRS, LENGTH = 3, 2, 90


def draw_batch() -> TokenBatch:
    """Return rows with pairs that have 0 to 8 common tokens, some with a target, and numbers for documents."""
    generator, ids, weights = np.random.default_rng(1), [], []
    for common in generator.integers(0, 9, ROWS * PAIRS):
        prompt = generator.integers(1, 50, common)
        for size in generator.integers(2, 10, 2):
            ids.append(np.concatenate([prompt, generator.integers(50, 99, size)]).astype(np.uint16))
            weights.append((np.arange(len(ids[-1])) >= min(common, 5)).astype(np.float32))
    numbers = [float(number) for number in range(1, 2 * ROWS * PAIRS + 1)]
    references = [-number for number in numbers]
    documents = TokenArrays.concatenate(ids, np.uint16, weights=weights, references=references, labels=numbers)
    pieces = [RowPiece(number, 0, len(ids[number])) for number in range(2 * ROWS * PAIRS)]
    return build_batch(documents, [pieces[2 * PAIRS * row :][: 2 * PAIRS] for row in range(ROWS)], LENGTH, pad_id=0)


def list_targets(batch: TokenBatch, mask: torch.Tensor) -> list[tuple[object, ...]]:
    """Return targets with a weight: row, document, position, weight, target, and the tokens that they see."""
    targets = []
    for row, column in (batch.weights > 0).nonzero().tolist():
        numbers = [batch.document_ids, batch.positions, batch.weights, batch.targets]
        seen = batch.tokens[row][mask[row, 0, column]].tolist()
        targets.append((row, *(numbers_by_row[row, column].item() for numbers_by_row in numbers), seen))
    return targets


def test_targets_see_the_tokens_of_separate_documents() -> None:
    """Every target with a weight is there once, at its position, and sees what it sees in a document of its own."""
    separate = draw_batch()
    shared = share_prompts(separate)
    assert shared.length < LENGTH and int(shared.shared_counts.sum()) > 10
    expected = list_targets(separate, create_tree_mask(separate.document_ids))
    mask = create_tree_mask(shared.reader_ids)
    assert expected and list_targets(shared, mask) == expected
    assert shared.padding is not None
    assert shared.visible_keys[~shared.padding].equal(mask.sum(-1).squeeze(1)[~shared.padding])
    assert shared.token_count == separate.token_count


def test_numbers_of_documents_stay_theirs() -> None:
    """References and labels are the same sums by document, and a row without weights counts no token."""
    separate = draw_batch()
    shared = share_prompts(separate)
    for name in ("reference", "labels"):
        ours, theirs = (sum_by_answer(getattr(batch, name), batch.document_ids) for batch in (shared, separate))
        assert ours[:, :PAIRS].equal(theirs[:, :PAIRS]) and not ours[:, PAIRS:].any(), name
    assert shared.with_zero_weights().token_count == 0
