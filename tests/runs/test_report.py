"""Reports of runs, at their end and by `drawloom report`."""

import json
import re
from pathlib import Path

from support.runs import REPORT, drawloom, rows, run_and_kill, write_corpus


def test_a_report_lists_starts_kills_and_resumes(tmp_path: Path) -> None:
    """A killed and resumed run reports both processes, and the command compares several runs in one report."""
    write_corpus(tmp_path)
    longer = ("run", "tiny.toml", "trainer.steps=60", "checkpoint.every=10", *REPORT)
    assert run_and_kill(tmp_path, "one", *longer, after=25)
    [outcome] = drawloom(tmp_path, *longer, "run.name=one")
    run = tmp_path / "runs/one"
    content = (run / "report.html").read_text("utf-8")
    assert outcome.code == 0 and "report in runs/one/report.html" in outcome.text and len(content) < 1_000_000
    kinds = re.findall(r"<td>(started|killed|resumed|ended)</td>", content)
    assert kinds == ["started", "killed", "resumed", "ended"] and "<td>all 60 steps are done</td>" in content
    [data] = json.loads(re.findall(r'id="data">(.*)</script>', content)[0])["runs"]
    assert data["axes"]["step"] == [row["step"] for row in rows(run)]
    assert data["curves"]["loss"]["y"] == [float(f"{row['loss']:.6g}") for row in rows(run)]
    assert "[trainer] phases" in content and "checkpoint.checkpointer" in content and "# after step 60" in content

    assert drawloom(tmp_path, "run", "tiny.toml", "run.name=two", "optimizer.lr=1e-3")[0].code == 0
    [outcome] = drawloom(tmp_path, "report", "runs/one", "runs/two", "corpus", "--to", "both.html")
    both = (tmp_path / "both.html").read_text("utf-8")
    assert outcome.code == 0 and "in both.html" in outcome.text
    assert "left out, because they have no run: corpus" in outcome.text
    recipes = both.partition("<h2>Recipes</h2>")[2]
    lines = re.findall(r"<tr><th class=.c\d.>(one|two)</th>(.*?)</tr>", recipes, re.DOTALL)
    assert "<th>optimizer.lr</th>" in recipes and [name for name, _ in lines] == ["one", "two"]
    assert "<td>0.004</td>" in lines[0][1] and "<td>0.001</td>" in lines[1][1]
    assert "<td>ended</td>" in both
    [outcome] = drawloom(tmp_path, "report", "corpus")
    assert outcome.code == 2 and "corpus is not a run folder" in outcome.text
