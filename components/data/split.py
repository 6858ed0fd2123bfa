"""Which documents are held out: a function of a document's own name or content, so that no other document matters."""

from hashlib import blake2b

from drawloom.components.ports.data import Split


def split_of(key: bytes, validation_fraction: float) -> Split:
    """The split of a document, by a hash of its key, if a share `held_out` (0 to 1) of all keys is held out."""
    fraction = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"
