"""Rows with pairs whose common beginning stands once."""

from itertools import accumulate

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drawloom.components.state.prefix_tree import round_width_up
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
    sources, readers, document_counts = [], [], []
    for row, document_ids in enumerate(batch.document_ids):
        bounds = [0, *accumulate(document_ids[is_token[row]].bincount().tolist())]
        kept, ids = torch.arange(0), torch.arange(0)
        for first, middle, last in zip(bounds[::2], bounds[1::2], bounds[2::2], strict=False):
            shared = count_shared_tokens(batch, row, first, middle, last)
            for name in {"reference", "labels"} & values.keys():
                values[name][row, middle + shared] = values[name][row, middle]
            kept = torch.cat([kept, torch.arange(first, middle), torch.arange(middle + shared, last)])
            ends = torch.full((len(kept) - len(ids),), -len(kept))
            ends[shared : middle - first] = first - middle - len(ids)
            ids = torch.cat([ids, ends])
        sources.append(kept)
        readers.append(ids)
        document_counts.append(len(bounds) - 1)
    missing = min(round_width_up(max(map(len, sources))), batch.length) - max(map(len, sources))
    index, ids = (pad(pad_sequence(rows, True, -1), (0, missing), value=-1) for rows in (sources, readers))
    padding = index < 0
    leaves = {name: x.gather(1, index.clamp_min(0)).masked_fill(padding, 0) for name, x in values.items()}
    leaves["targets"][padding] = IGNORE_INDEX
    leaves["document_ids"] += padding * torch.tensor(document_counts)[:, None]
    reader_ids = ids.where(~padding, -torch.arange(1, index.shape[1] + 1))  # padding is seen by itself
    shared_counts = is_token.sum(1) - (~padding).sum(1)
    return SharedPairs(**leaves | {"padding": padding}, reader_ids=reader_ids, shared_counts=shared_counts)


def count_shared_tokens(batch: TokenBatch, row: int, first: int, middle: int, last: int) -> int:
    """Count the tokens without a weight that the rejected document, from `middle` on, shares with the chosen one."""
    length = min(middle - first, last - middle)
    is_equal = batch.tokens[row, first : first + length] == batch.tokens[row, middle : middle + length]
    common = int(is_equal.long().cumprod(0).sum())
    first_target = int((batch.weights[row, middle:last] > 0).long().argmax())
    return min(common, first_target)
