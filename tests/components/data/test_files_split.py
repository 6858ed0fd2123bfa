"""Which documents are held out."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.files import split_of


@given(st.binary(), st.floats(0, 1), st.floats(0, 1))
def test_holding_more_out_only_adds_documents(key: bytes, one: float, other: float) -> None:
    """A document that a smaller share holds out is held out by every greater share too."""
    low, high = sorted((one, other))
    if split_of(key, low) == "validation":
        assert split_of(key, high) == "validation"


def test_share_is_what_was_asked_for() -> None:
    """Of 20,000 keys a share of 0.1 holds out 2,000, to five standard deviations."""
    held_out = sum(split_of(b"%d" % number, 0.1) == "validation" for number in range(20_000))
    assert abs(held_out - 2_000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5


def test_split_is_the_same_in_every_version() -> None:
    """Known keys stay where they are: another hash would move documents that a model has learned from."""
    fractions = {b"a": 0x40F89E395B66422F / 2**64, b"abc.py": 0x4538B7851783F5F6 / 2**64}  # b2sum -l 64
    for key, fraction in fractions.items():
        assert split_of(key, fraction * 0.999) == "train"
        assert split_of(key, fraction * 1.001) == "validation"
