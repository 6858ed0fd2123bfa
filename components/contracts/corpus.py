"""What every corpus does."""

from drawloom.components.ports.data import Corpus
from drawloom.graph.testing import expect


def documents_are_texts(corpus: Corpus) -> None:
    """There is something to learn from, and every document is a text, though it may be empty."""
    documents = list(corpus.documents("train"))
    expect(documents, "there is no document to learn from")
    expect(
        any(documents) and all(isinstance(text, str) for text in documents), "a document is no text, or all are empty"
    )


def the_order_is_stable(one: Corpus, other: Corpus) -> None:
    """The documents of a split are the same, in the same order, every time that they are asked for."""
    for split in ("train", "validation"):
        first = list(one.documents(split))
        expect(first == list(one.documents(split)), f"asked for again, {split} is another")
        expect(first == list(other.documents(split)), f"another corpus that is made alike has another {split}")


def what_is_held_out_is_not_learned(corpus: Corpus) -> None:
    """Splits are of documents: hardly a text is in both, as where two files are copies."""
    learned, held_out = ({*corpus.documents(split)} - {""} for split in ("train", "validation"))
    shared = len(learned & held_out)
    expect(shared * 20 <= len(held_out), f"{shared} of {len(held_out)} texts that are held out are learned")
