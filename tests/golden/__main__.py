"""Rewrite the recorded output: `python tests/golden`. Read the difference before keeping it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import evolve

from generate import coming
from generate.schedules import PAGE, page
from generate.step import PICTURE, step_picture
from support.editing import record
from support.golden import FAULTY, GOLDEN, GOOD, read_blocks, resolve_recipe, run_check, write_blocks, write_faulty
from support.schedules import NAMES, golden

with TemporaryDirectory() as name:
    folder = write_faulty(Path(name))
    for file in {*FAULTY.glob("*.txt")} - {FAULTY / "bases.txt"}:
        blocks = [evolve(block, output=run_check(folder / f"{block.name}.toml")) for block in read_blocks(file)]
        write_blocks(file, blocks)
for recipe in sorted(GOOD.glob("[!f]*.toml")):  # only the shop's recipes; first_run changes with drawloom
    recipe.with_suffix(".txt").write_text(resolve_recipe(recipe), "utf-8")
(GOLDEN / "editing.txt").write_text(record(), "utf-8")
for name in NAMES:
    (GOLDEN / "schedules" / f"{name}.txt").write_text(golden(name), "utf-8")
PAGE.write_text(page(), "utf-8")
coming.PAGE.write_text(coming.page(), "utf-8")
PICTURE.write_text(step_picture(), "utf-8")
