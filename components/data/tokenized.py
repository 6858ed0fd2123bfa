"""Corpus in a token store, which `drawloom tokenize` writes."""

from pathlib import Path

from drawloom import UserError, component, internal, setting, wired
from drawloom.components.data.sources.documents import validation_fraction
from drawloom.components.data.store.store import Store, select_split_documents
from drawloom.ports import Split, TokenDocuments, Tokenizer


@component
class Tokenized:
    """
    Corpus in a memory-mapped token store.

    A document's split depends only on its ids, so duplicates are never in both splits.
    """

    tokenizer: Tokenizer | None = wired(default=None)
    path: Path = setting("the token store's folder, relative to the current directory")
    validation_fraction: float = validation_fraction("documents")
    validation_path: Path | None = setting(
        "token store for the validation split; all documents in `path` are then for training", default=None
    )
    _train: Store = internal(None)
    _validation: Store | None = internal(None)

    def open(self) -> None:
        """Open the stores, unless `check_before_open` has."""
        if self._train is None:
            self.check_before_open()

    def check_before_open(self) -> None:
        """
        Open the stores. Raises UserError if one is damaged, if their tokenizers differ, or if the run's tokenizer
        begins or ends documents differently.
        """
        self._train = _open_store("path", self.path)
        if self.tokenizer is not None:
            stored, own = ([*ids.prefix_ids, ids.eos_id] for ids in (self._train, self.tokenizer))
            if stored != own:
                text = f"path: {self.path} has the begin and end ids {stored}, and the run's tokenizer {own}"
                raise UserError(f"{text}; set its begin_token and end_token, or make the store with it", 2)
        if self.validation_path is not None:
            self._validation = _open_store("validation_path", self.validation_path)
            if self._validation.tokenizer != self._train.tokenizer:
                difference = f"{self.validation_path} has another tokenizer than {self.path}"
                raise UserError(f"validation_path: {difference}; tokenize both with the same one")

    def compute_mean_document_length(self) -> float | None:
        """Return the mean document length in tokens, also before `open`; None if there are no documents."""
        try:
            store = Store.open(self.path)
        except UserError:
            return None
        documents = sum(shard.documents for shard in store.shards)
        return store.token_count / documents if documents else None

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size."""
        return self._train.vocab_size

    @property
    def eos_id(self) -> int:
        """The tokenizer's end token."""
        return self._train.eos_id

    def documents(self, split: Split) -> TokenDocuments:
        if self._validation is not None:
            return self._train if split == "train" else self._validation
        return select_split_documents(self._train, self._train.document_hashes, split, self.validation_fraction)


def _open_store(setting_name: str, path: Path) -> Store:
    """Open a store. Raises UserError with the setting's name."""
    try:
        return Store.open(path)
    except UserError as error:
        raise UserError(f"{setting_name}: {error}") from error
