"""The picture of a training step."""

from generate.step import PICTURE, step_picture


def test_picture_shows_the_step_of_first_run() -> None:
    """The picture in the repository is the output of `drawloom draw first_run --step`."""
    assert PICTURE.read_text("utf-8") == step_picture()
