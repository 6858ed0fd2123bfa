"""The page: one file without a network, in which nothing from a run is markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest

from drawloom.components.checkpoint.commit import Manifest
from drawloom.components.report.page import FOLDER, render_page
from drawloom.components.report.run_record import Drawings, RunRecord, read_run_record

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e\ud800"


class Elements(HTMLParser):
    """A page's elements with their attributes, and the text by element kind."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)


def run_in(folder: Path, name: str = "mine", steps: int = 240, drawings: Drawings | None = None) -> RunRecord:
    """Return a run of some steps."""
    rows = [
        {"step": step, "loss": 1 / step, "tokens": 8 * step, "tokens_per_second": 4.0} for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_run_record(folder, name, drawings or Drawings())


def data_of(content: str) -> dict[str, Any]:
    """Return the curves of a page."""
    [script] = re.findall(r'<script type="application/json" id="data">(.*)</script>', content)
    data: dict[str, Any] = json.loads(script)
    return data


def test_curves_are_numbers_in_the_page(tmp_path: Path) -> None:
    """The page's script finds every step of a short run, with its tokens and seconds."""
    content = render_page([run_in(tmp_path)])
    [run] = data_of(content)["runs"]
    assert run["curves"]["loss"]["x"] == run["axes"]["step"] == list(range(1, 241))
    assert run["curves"]["loss"]["y"][3] == 0.25
    assert run["axes"]["seconds"][3] == 8 and run["axes"]["tokens"][3] == 32
    assert len(content) < 100_000


def page_saying(words: str, folder: Path) -> str:
    """Return a page for a run whose every text is these words."""
    (folder / "log").mkdir(exist_ok=True)
    line = f"2026-01-01 00:00:00,000 WARNING drawloom.run: {words}\n"
    (folder / "log/rank-0.log").write_bytes(line.encode("utf-8", "replace"))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, words: 2.0}), "utf-8")
    sampled = {"prompt": words, "completion": words, "reward": 0.5, "advantage": None, "tokens": 3, "stop": words}
    line = json.dumps({"step": 1, "completions": [sampled, 3]})
    (folder / "rollouts.jsonl").write_text(f"not JSON\n{line}\n", "utf-8")
    run = read_run_record(folder, words, Drawings(missing=words))
    runs = [attrs.evolve(run, recipe=f'[run]\nname = "{name}"\n# {words}', sample=words) for name in "ab"]
    return render_page(runs)


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """Markup in names, metrics, log lines, samples and recipes adds no element, attribute or script."""
    hostile, tame = page_saying(EVIL, tmp_path), page_saying("tame", tmp_path)
    shapes = [[(tag, list(attrs)) for tag, attrs in Elements(content).found] for content in (hostile, tame)]
    assert shapes[0] == shapes[1]
    assert "<th>0.500</th><td></td><td>3</td><td>tame</td><td>tame</td><td>tame</td>" in tame
    assert "\u202e" not in hostile  # it would turn the direction of what follows
    hostile.encode()  # a lone surrogate, as in a file name, would have no encoding
    assert data_of(hostile)["runs"][0]["curves"].keys() == {"loss", f"{EVIL[:-2]}\ufffd\ufffd"}


def test_the_policy_lets_this_script_and_style_alone(tmp_path: Path) -> None:
    """The policy has the hashes of the page's script and style, and no attribute needs more."""
    elements = Elements(render_page([run_in(tmp_path)]))
    [policy] = [attributes["content"] for tag, attributes in elements.found if "http-equiv" in attributes]
    [style] = elements.texts["style"]
    script = "".join(elements.texts["script"][1:])  # after the data
    for kind, content in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'; base-uri 'none'")
    assert not [attributes for _, attributes in elements.found if attributes.keys() & {"style", "src", "href"}]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML", style + script)


def test_runs_are_compared(tmp_path: Path) -> None:
    """Runs have rows with their losses and differing settings; equal columns are left out."""
    run = run_in(tmp_path)
    runs = [attrs.evolve(run, name=name, recipe=f'[lr]\nuse = "x"\nto = {name}\n') for name in ("1.0", "2.0")]
    content = render_page(runs)
    assert "<tr><th>recipe</th><th>lr.to</th></tr>" in content
    assert '<tr><th class="c0">1.0</th><td>1.0</td></tr><tr><th class="c1">2.0</th>' in content.replace("\n", "")
    assert "The same in each: seeds 1, loss, step 240 0.0042." in content
    assert [shown_run["name"] for shown_run in data_of(content)["runs"]] == ["1.0", "2.0"]
    assert "<h2>Recipes</h2>" not in render_page([run])


def test_seeds_of_a_recipe_share_a_curve(tmp_path: Path) -> None:
    """The curve is their mean with a band, at common steps; the table has mean and deviation."""
    runs = []
    for seed, factor in enumerate((1.0, 3.0)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        recipe = f'[run]\nuse = "run.job"\nname = "{seed}"\nseed = {seed}\n'
        rows = [{"step": step, "loss": factor * step} for step in range(1, 5 + seed)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        runs.append(attrs.evolve(read_run_record(folder, str(seed), Drawings()), recipe=recipe))
    content = render_page(runs)
    [group] = data_of(content)["runs"]
    curve = {"x": [1, 2, 3, 4], "y": [2, 4, 6, 8], "low": [1, 2, 3, 4], "high": [3, 6, 9, 12]}
    assert group["name"] == "0 (2 seeds)" and group["curves"]["loss"] == curve
    assert "8.0000 ± 5.7" in content and "differ in seeds and names alone" in content


def test_equal_values_of_all_runs_are_shown_once(tmp_path: Path) -> None:
    """An overview row equal in all runs has one cell; another row has a cell for each run."""
    runs = [attrs.evolve(run_in(tmp_path, steps=steps), name=name) for name, steps in (("a", 4), ("b", 8))]
    content = render_page(runs)
    assert '<tr><th>mean speed</th><td colspan="2">4 tokens/s</td></tr>' in content
    assert "<tr><th>tokens</th><td>32</td><td>64</td></tr>" in content


def test_columns_of_equal_cells_are_a_line_below_the_table(tmp_path: Path) -> None:
    """Sizes and ranks of checkpoints, if they do not differ; a column with nothing in it is left out."""
    manifests = [(step, manifest_of(step, loss)) for step, loss in ((1, 3.0), (2, 2.0))]
    content = render_page([attrs.evolve(run_in(tmp_path), checkpoints=manifests)])
    assert "<tr><th>step</th><th>loss</th></tr>" in content and "<tr><th>1</th><td>3.0000</td></tr>" in content
    assert "The same in each: size 8 bytes, ranks 1." in content
    one = render_page([attrs.evolve(run_in(tmp_path), checkpoints=manifests[:1])])
    assert "<tr><th>1</th><td>3.0000</td><td></td><td>8 bytes</td><td>1</td></tr>" in one


def manifest_of(step: int, loss: float) -> Manifest:
    """Return the manifest fields shown on a page."""
    return cast(Manifest, SimpleNamespace(step=step, values={"loss": loss}, total_file_bytes=8, world_size=1))


def test_a_long_sample_shows_its_beginning(tmp_path: Path) -> None:
    """Its first 300 characters are seen at once, and all of it behind a click; a short one is seen whole."""
    run = run_in(tmp_path)
    content = render_page([attrs.evolve(run, sample=f"# after step 1\n{'a' * 300}{'b' * 100}\n")])
    assert f"<pre># after step 1\n{'a' * 300} ...</pre>" in content
    assert f"<details><summary>All of the sample</summary><pre># after step 1\n{'a' * 300}bbb" in content
    short = render_page([attrs.evolve(run, sample=f"# after step 1\n{'a' * 300}\n")])
    assert f"{'a' * 300}\n</pre>" in short and "All of the sample" not in short


@pytest.mark.parametrize("name", ["page.js", "page.css"])
def test_the_page_can_hold_its_parts(name: str) -> None:
    """Neither script nor style ends its own element."""
    assert "</" not in (FOLDER / name).read_text("utf-8")
