"""Robustness: any text ends in a checked graph or in problems."""

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawloom.graph.cli.main import main
from drawloom.graph.project import Project
from drawloom.graph.toml.emit import dump_key, dump_toml
from support.golden import GOOD, read_faulty
from support.made_up import recipes

PROJECT = Project.from_package("support.shop")

PIECES = [
    '"', "'", '"""', "'''", "[", "]", "[[", "]]", "{", "}", "=", ".", ",", "#", "\n", "\r\n", "\r", "\t", " ", "\\",
    "@", "$", "$vars.", "@store", "use", "extends", "unset", "edit", "vars", "format", "true", "nan", "inf",
    "1e400", "-0.0", "0x", "9" * 30, "1979-05-27", "é", "\u0430", "\u202e", "\U0001f600", "\x7f", "trainer", "pages",
    "__class__", "..", "stores.memory", "pages.plain", "os.system", "small", "../x.toml", "*", "@more.*", "'''\n",
]  # fmt: skip

TEXTS = [block.recipe for block in read_faulty().values()]
TEXTS += [path.read_text("utf-8") for path in sorted(GOOD.glob("*.toml"))]


def as_toml(data: dict[str, Any]) -> str:
    """Return a recipe's text."""
    lines: list[str] = []
    for name, table in data.items():
        nodes = table if "use" not in table else {"": table}
        for member, node in nodes.items():
            lines += [f"[{dump_key(name)}{f'.{dump_key(member)}' if member else ''}]"]
            lines += [f"{dump_key(k)} = {dump_toml(v)}" for k, v in node.items()]
    return "\n".join(lines)


HOSTILE = [
    "[store]\nuse = 'stores.memory'\r",
    "\x00",
    "[a]\nuse = {}\n[b]\nuse = []\n[c]\nuse = 1\n[d]\nuse = '@a'\n[e]\nuse = '$vars.x'",
    "a" * 100_000,
    "\n".join(f"[n{number}]\nuse = 'nobody.{number}'" for number in range(3000)),
    "\n".join(f"[n{number}]\nuse = 'pages.plain'\nfallback = '@m{number}'" for number in range(3000)),
    "\n".join(f"k{number} = 1" for number in range(20_000)),
    "[a]\nuse='pages.plain'\n" + "\n".join(f"k{number} = 1" for number in range(5_000)),
    "[trainer]\nuse = 'servers.loop'\npages = [" + "'@page'," * 5_000 + "]\n[page]\nuse = 'pages.plain'",
    "[x]\nuse='stores.varied'\nanything=" + "[" * 31 + "1" + "]" * 31,
    "[x]\nuse='stores.varied'\nanything=" + "{a=" * 30 + "1" + "}" * 30,
    "[x]\nuse='stores.varied'\ntexts=[" + "'a'," * 100_000 + "]",
    "[x]\nuse='stores.varied'\nwhole=" + "1_" * 200_000 + "1",
    "[x]\nuse='stores.varied'\ntext='" + "x" * 900_000 + "'",
    "extends = [" + "'small'," * 20_000 + "]",
    "unset = [" + "'nobody'," * 20_000 + "]",
    "[vars]\nx = [" + "'@a'," * 20_000 + "'@b']\n[edit.vars.x]\nremove = [" + "'@c'," * 20_000 + "]\nafter.'@b' = 1",
    "[vars]\n" + "\n".join(f"v{number} = 1" for number in range(20_000)),
    "[g]\n" + "\n".join(f"m{number} = {{use = 'pages.parse'}}" for number in range(5_000)),
]


@st.composite
def draw_damaged_text(draw: st.DrawFn) -> str:
    """Draw a recipe's text with pieces cut, doubled, swapped and inserted."""
    text = draw(recipes().map(as_toml) | st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        put = draw(st.sampled_from(PIECES) | st.text(max_size=4) | st.just(text[start:end] * 2))
        text = text[:start] + put * draw(st.sampled_from([1, 1, 1, 2, 40])) + text[end:]
    return text


def run_check(folder: Path, content: bytes) -> tuple[int, str]:
    """Return the exit code and stderr of `check`."""
    recipe = folder / "recipe.toml"
    recipe.write_bytes(content)
    stderr, stdout = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
        code = main(["check", str(recipe)], PROJECT)
    return code, stderr.getvalue()


def assert_success_or_problems(folder: Path, content: bytes) -> None:
    """Assert that `check` succeeds or prints problems with positions and codes, within 3 s."""
    began = time.process_time()
    code, stderr = run_check(folder, content)
    assert time.process_time() - began < 3
    assert code in (0, 2)
    lines = [line for line in stderr.splitlines() if line]
    assert bool(lines) or code == 0
    for line in lines:
        assert line.startswith(str(folder)) or "shop/recipes" in line or line.startswith(("and ", "command line"))
        assert line.endswith(")") or line.startswith("and ")


@given(text=draw_damaged_text())
@settings(suppress_health_check=list(HealthCheck))
def test_no_text_ends_in_a_traceback(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Checking any damaged recipe ends in success or in problems with positions."""
    assert_success_or_problems(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{len(text)} of {text[:25]!r}")
def test_hostile_texts_are_reported_within_seconds(text: str, tmp_path: Path) -> None:
    """Thousands of nodes, faults, names or items end in success or problems within seconds."""
    assert_success_or_problems(tmp_path, text.encode())


@given(put=st.binary(max_size=60), at=st.integers(0, 400))
def test_no_bytes_end_in_a_traceback(put: bytes, at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes that are not text do not end in a traceback."""
    text = TEXTS[0].encode()
    assert_success_or_problems(tmp_path_factory.getbasetemp(), text[:at] + put + text[at:])


@pytest.mark.parametrize("size", [1 << 20, 10 << 20])
@pytest.mark.parametrize("letter", ["a", "[", '"', "\n", " ", "a.", "#", "=", "{", "'''", "\\"])
def test_huge_files_are_refused_within_seconds(letter: str, size: int, tmp_path: Path) -> None:
    """Files of one and ten megabytes are read or refused within seconds."""
    assert_success_or_problems(tmp_path, (letter * size)[:size].encode())


@given(data=recipes(), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
@settings(max_examples=30)
def test_line_ends_and_marks_change_nothing(
    data: dict[str, Any], end: str, mark: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A valid recipe stays valid with other line ends and with a byte order mark."""
    text = as_toml(data).replace("\n", end)
    code, stderr = run_check(tmp_path_factory.getbasetemp(), (b"\xef\xbb\xbf" if mark else b"") + text.encode())
    assert code == 0, stderr
