"""Data: corpora, tokenizers, packed rows, their order, and the loader."""
