"""Text corpus, tokenized once into cached token stores."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from drawloom import component, setting
from drawloom.components.data.sources.documents import DividedCorpus, EncodedCorpus, Part
from drawloom.ports import Corpus, RunInfo, Split, TokenDocuments

SPLITS: tuple[Split, ...] = ("train", "validation")
CACHE = ".tokens"

log = logging.getLogger("drawloom.data")


@component
class TokenizedText(EncodedCorpus):
    """
    A text corpus's tokenized documents, with end tokens; empty documents are dropped.

    The first process on a host writes a token store per split into a cache, while the others wait; later runs with
    the same files and tokenizer reuse it. A corpus without files is tokenized in memory.
    """

    corpus: Corpus
    job: RunInfo
    cache: Path | None = setting(
        "folder for cached token stores; default: `.tokens` beside the run folder", default=None, impact="safe"
    )

    def open(self) -> None:
        """
        Open the cached stores, or write them. Raises UserError if a file is unreadable, or the cache is not
        writable.
        """
        if isinstance(self.corpus, DividedCorpus):
            self._splits = {split: self._open_or_build_store(self.corpus.parts(split), split) for split in SPLITS}
        else:
            from drawloom.components.data.token_arrays import tokenize_split

            self._splits = {split: tokenize_split(self.corpus, self.tokenizer, split) for split in SPLITS}

    def _open_or_build_store(self, parts: Sequence[Part], split: Split) -> TokenDocuments:
        """Open a split's cached store, after writing or completing it if necessary."""
        from drawloom.components.data.store.build import build_store, make_store_plan

        plan = json.dumps(make_store_plan(parts, self.tokenizer))
        cache = self.cache if self.cache is not None else self.job.folder_path.parent / CACHE
        folder = cache / f"{hashlib.sha256(plan.encode()).hexdigest()[:16]}-{split}"
        log.debug("%s: %s documents are in %s", type(self.corpus).__name__, split, folder)
        return build_store(folder, parts, self.tokenizer, workers=len(os.sched_getaffinity(0)))
