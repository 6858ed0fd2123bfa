"""
Attention to the keys that an indexer chooses for each token (DSA: DeepSeek-V3.2, arXiv 2512.02556, section 2).

All heads share the keys, which are latents; a latent's first channels are its value. A choice is int32
(rows, length, chosen): keys' indices in the row, and -1 after the last one if there are fewer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.operation import upcast


def choose_keys_eager(
    queries: Tensor, keys: Tensor, factors: Tensor, first_key: Tensor, visible_counts: Tensor, chosen: int
) -> tuple[Tensor, Tensor]:
    """
    Choose the `chosen` visible keys with the best scores for each token; return the choice and its scores.

    queries (rows, length, heads, width), keys (rows, keys, width) and factors (rows, length, heads): a score is the sum
    over heads: factor * relu(query . key). A token sees `visible_counts` keys from the index `first_key`
    on, int32 (rows, length). Scores are at least float32 (rows, length, chosen), -inf without a key.
    """
    products = torch.einsum("rqhd,rkd->rqhk", upcast(queries), upcast(keys)).relu()
    scores = torch.einsum("rqhk,rqh->rqk", products, upcast(factors))
    key, first_key = torch.arange(keys.shape[1], device=keys.device), first_key[..., None]
    visible = (key >= first_key) & (key < first_key + visible_counts[..., None])
    best = scores.masked_fill(~visible, -torch.inf).topk(min(chosen, keys.shape[1]))
    missing = 0, chosen - best.indices.shape[-1]
    choice = F.pad(best.indices.masked_fill(best.values == -torch.inf, -1), missing, value=-1)
    return choice.int(), F.pad(best.values, missing, value=-torch.inf)


def sparse_attention_eager(
    q: Tensor, latents: Tensor, choice: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """
    Return attention to the chosen latents, and the weights' sums over heads.

    q (rows, length, heads, width), latents (rows, keys, width), choice (rows, length, chosen) with -1 behind the chosen
    keys if they are fewer; results are (rows, length, heads, value_width) in q's dtype and at least float32 (rows,
    length, chosen), without gradients.
    """
    keys = latents.shape[1]
    places = choice.masked_fill(choice < 0, keys).long()
    visible = torch.zeros(*choice.shape[:2], keys + 1, dtype=torch.bool, device=q.device).scatter(-1, places, True)
    products = upcast(torch.einsum("rqhd,rkd->rhqk", q, latents)) * scale
    weights = products.masked_fill(~visible[:, None, :, :keys], -torch.inf).softmax(-1)
    mixed = torch.einsum("rhqk,rkd->rqhd", weights.to(q.dtype), latents[..., :value_width])
    sums = weights.detach().sum(1).gather(-1, choice.clamp(min=0).long())
    return mixed, sums.masked_fill(choice < 0, 0.0)
