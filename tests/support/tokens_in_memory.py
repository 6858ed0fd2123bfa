"""A corpus of token ids."""

import attrs
import numpy as np

from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.corpus import Split


@attrs.frozen
class TokensInMemory:
    """A corpus of given documents, without added end tokens."""

    train: list[list[int]]
    validation: list[list[int]]
    vocab_size: int = 100_000
    eos_id: int = 0

    def documents(self, split: Split) -> TokenArrays:
        split_documents = self.train if split == "train" else self.validation
        return TokenArrays.concatenate([np.array(document, np.int64) for document in split_documents], np.uint32)
