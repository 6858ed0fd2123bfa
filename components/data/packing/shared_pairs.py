"""Rows with pairs whose common beginning stands once."""

from itertools import accumulate

import torch

from drawloom.components.state.prefix_tree import (
    SharedText,
    count_common_tokens,
    create_tree_rows,
    pack_texts,
    round_width_up,
)
from drawloom.ports import IGNORE_INDEX, SharedPairs, TokenBatch


def share_prompts(batch: TokenBatch) -> SharedPairs:
    """
    Return the rows without tokens of rejected documents shared with the chosen ones.

    A rejected document keeps its tokens from the first weight on. Rows are as narrow as the longest one permits; there
    are four widths between two powers of two.
    """
    is_token = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.padding is None else ~batch.padding
    values = {
        name: x.clone()  # because documents' numbers move to their first kept tokens
        for name, spec in batch.specs.items()
        if spec == "tokens" and (x := getattr(batch, name)) is not None
    }
    packed, document_counts = [], []
    for row, document_ids in enumerate(batch.document_ids):
        bounds = [0, *accumulate(document_ids[is_token[row]].bincount().tolist())]
        texts: list[SharedText] = []
        for first, middle, last in zip(bounds[::2], bounds[1::2], bounds[2::2], strict=False):
            shared = count_shared_tokens(batch, row, first, middle, last)
            for name in {"reference", "labels"} & values.keys():
                values[name][row, middle + shared] = values[name][row, middle]
            texts += SharedText(first, middle - first, 0), SharedText(middle, last - middle, shared)
        packed.append(pack_texts(texts))
        document_counts.append(len(bounds) - 1)
    width = min(round_width_up(max(len(texts.sources) for texts in packed)), batch.length)
    sources, reader_ids, padding = create_tree_rows(packed, width)
    leaves = {name: x.gather(1, sources).masked_fill(padding, 0) for name, x in values.items()}
    leaves["targets"][padding] = IGNORE_INDEX
    leaves["document_ids"] += padding * torch.tensor(document_counts)[:, None]
    shared_counts = is_token.sum(1) - (~padding).sum(1)
    return SharedPairs(**leaves | {"padding": padding}, reader_ids=reader_ids, shared_counts=shared_counts)


def count_shared_tokens(batch: TokenBatch, row: int, first: int, middle: int, last: int) -> int:
    """Count the tokens without a weight that the rejected document, from `middle` on, shares with the chosen one."""
    common = count_common_tokens(batch.tokens[row, first:middle], batch.tokens[row, middle:last])
    first_target = int((batch.weights[row, middle:last] > 0).long().argmax())
    return min(common, first_target)
