"""The training and validation split."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.sources.documents import choose_split


@given(st.binary(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_validation_fraction_only_adds_documents(key: bytes, one: float, other: float) -> None:
    """A validation document at one fraction stays one at every larger fraction."""
    low, high = sorted((one, other))
    if choose_split(key, low) == "validation":
        assert choose_split(key, high) == "validation"


def test_the_validation_fraction_is_met() -> None:
    """A fraction of 0.1 selects 2,000 of 20,000 keys, to five standard deviations."""
    validation = sum(choose_split(b"%d" % number, 0.1) == "validation" for number in range(20_000))
    assert abs(validation - 2_000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5


def test_the_split_never_changes() -> None:
    """Known keys keep their split: another hash would move trained documents to the validation split."""
    fractions = {b"a": 0x40F89E395B66422F / 2**64, b"abc.py": 0x4538B7851783F5F6 / 2**64}  # b2sum -l 64
    for key, fraction in fractions.items():
        assert choose_split(key, fraction * 0.999) == "train"
        assert choose_split(key, fraction * 1.001) == "validation"
