"""Philox against its authors' known answers, and bit frequencies."""

import torch

from drawloom.kernels.stochastic_rounding.eager import philox

ALL = 2**64 - 1


def words(key: int, index: int, counter: int) -> list[str]:
    return [f"{word.item():08x}" for word in philox(key, torch.tensor([index]), counter)]


def test_words_equal_the_published_answers() -> None:
    """Words equal the vectors that Random123 publishes for Philox-4x32-7."""
    assert words(0, 0, 0) == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    assert words(ALL, -1, ALL) == ["5207ddc2", "45165e59", "4d8ee751", "8c52f662"]
    key, index, counter = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E
    signed = index - 2**64
    assert words(key, signed, counter) == ["4dfccaba", "190a87f0", "c47362ba", "b6b5242a"]


def test_every_bit_is_set_half_of_the_time() -> None:
    """Over many indices every one of the 128 bits is set half of the time, within five standard deviations."""
    drawn = torch.stack(philox(7, torch.arange(40_000), 3))
    shares = torch.stack([(drawn >> bit & 1).double().mean(1) for bit in range(32)])
    assert ((shares - 0.5).abs() < 5 * 0.5 / 200).all()


def test_key_index_and_counter_change_the_words() -> None:
    """Changing any one of them, also in its upper half, changes the words."""
    different = {tuple(words(*arguments)) for arguments in ARGUMENTS}
    assert len(different) == len(ARGUMENTS)


ARGUMENTS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**32)]
