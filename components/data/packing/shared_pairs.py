"""Rows of pairs in which both answers' common beginning stands once."""

from itertools import accumulate

import torch
from torch import Tensor

from drawloom.components.state.prefix_tree import round_width_up
from drawloom.ports import IGNORE_INDEX, SharedPairs, TokenBatch


def share_prompts(batch: TokenBatch) -> SharedPairs:
    """
    Return rows of pairs in which rejected documents lack the tokens shared with the chosen ones.

    A rejected document keeps its tokens from the first weight on. Rows are as narrow as the longest one permits; there
    are four widths between two powers of two.
    """
    is_token = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.padding is None else ~batch.padding
    values = {
        name: x.clone()  # because documents' numbers move to their first kept tokens
        for name, spec in batch.specs.items()
        if spec == "tokens" and (x := getattr(batch, name)) is not None
    }
    lengths = [
        documents[kept].bincount().tolist() for documents, kept in zip(batch.document_ids, is_token, strict=True)
    ]
    sources: list[Tensor] = []
    readers: list[Tensor] = []
    for row, counts in enumerate(lengths):
        bounds, kept, ids = [0, *accumulate(counts)], [torch.empty(0, dtype=torch.int64)], []
        for first, middle, last in zip(bounds[::2], bounds[1::2], bounds[2::2], strict=False):
            shared = count_shared_tokens(batch, row, first, middle, last)
            for name in {"reference", "labels"} & values.keys():
                values[name][row, middle + shared] = values[name][row, middle]
            begin = sum(map(len, kept))
            kept += [torch.arange(first, middle), torch.arange(middle + shared, last)]
            branch, end = begin + middle - first, begin + last - first - shared
            ids += [-end] * shared + [-branch] * (middle - first - shared) + [-end] * (end - branch)
        sources.append(torch.cat(kept))
        readers.append(torch.tensor(ids, dtype=torch.int64))
    shape = batch.row_count, min(round_width_up(max(map(len, sources))), batch.length)
    padding, reader_ids = torch.ones(shape, dtype=torch.bool), -torch.arange(1, shape[1] + 1).repeat(shape[0], 1)
    index = torch.zeros(shape, dtype=torch.int64)
    for row, (kept_tokens, row_readers) in enumerate(zip(sources, readers, strict=True)):
        count = len(kept_tokens)
        index[row, :count], reader_ids[row, :count], padding[row, :count] = kept_tokens, row_readers, False
    leaves = {name: x.gather(1, index).masked_fill(padding, 0) for name, x in values.items()}
    leaves["targets"][padding] = IGNORE_INDEX
    leaves["document_ids"] += padding * torch.tensor([[len(counts)] for counts in lengths])
    shared_counts = is_token.sum(1) - torch.tensor([len(kept_tokens) for kept_tokens in sources])
    return SharedPairs(**leaves | {"padding": padding}, reader_ids=reader_ids, shared_counts=shared_counts)


def count_shared_tokens(batch: TokenBatch, row: int, first: int, middle: int, last: int) -> int:
    """Count the tokens without a weight that the rejected document, from `middle` on, shares with the chosen one."""
    length = min(middle - first, last - middle)
    is_equal = batch.tokens[row, first : first + length] == batch.tokens[row, middle : middle + length]
    common = int(is_equal.long().cumprod(0).sum())
    first_target = int((batch.weights[row, middle:last] > 0).long().argmax())
    return min(common, first_target)
