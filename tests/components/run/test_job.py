"""The run's name, folder and seed."""

from pathlib import Path

import pytest

from drawloom.components.run.job import NamedRun


def test_the_folder_is_derived_from_the_name_by_default() -> None:
    """It is runs/ and the name, or the setting; nothing is made on disk."""
    assert NamedRun(name="first").path == Path("runs/first")
    assert NamedRun(name="first", folder=Path("/elsewhere")).path == Path("/elsewhere")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "a\0b"])
def test_a_name_is_a_plain_file_name(name: str) -> None:
    """Names that lead out of runs/ or are hidden are refused."""
    with pytest.raises(ValueError, match="is not a plain file name"):
        NamedRun(name=name)


def test_a_seed_is_a_number_of_63_bits() -> None:
    """torch's generators take no negative seeds."""
    assert NamedRun(name="a", seed=2**63 - 1).seed == 2**63 - 1
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="is not in"):
            NamedRun(name="a", seed=seed)
