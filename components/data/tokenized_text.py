"""Documents of text as token ids: tokenized once, at the start of a run."""

import attrs

from drawloom.components.data.token_arrays import TokenArrays, tokenize
from drawloom.components.ports.corpus import Corpus, Split, Tokenizer
from drawloom.graph import component

SPLITS: tuple[Split, ...] = ("train", "validation")


@component
class TokenizedText:
    """The documents of a corpus of text, each followed by the tokenizer's end token; empty ones are dropped."""

    corpus: Corpus
    tokenizer: Tokenizer
    _splits: dict[Split, TokenArrays] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Tokenize both splits."""
        self._splits = {split: tokenize(self.corpus, self.tokenizer, split) for split in SPLITS}

    def close(self) -> None:
        """Free the tokens."""
        self._splits = {}

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.eos_id

    def documents(self, split: Split) -> TokenArrays:
        """The documents of a split."""
        return self._splits[split]
