"""Optimizer state in host memory (optimizer offload) in whole runs."""

from pathlib import Path

from support.runs import drawloom, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")


def test_sharded_muon_resumes_on_the_device_with_the_bits_of_a_resident_run(tmp_path: Path) -> None:
    """Two shards with Muon's and AdamW's state in host memory continue without it, and lose no bit."""
    write_corpus(tmp_path)
    common = ["run", "tiny.toml", "trainer.on_finish=[]", "evaluate.every='last'", "mesh.data_shard=2"]
    common += [
        "optimizer.use=optim.muon",
        "optimizer.lr=0.01",
        "batch.micro_size=1",
        "lr.start=1.0",
        "lr.phases=[{to=1.0,steps=1}]",
    ]
    for name, steps, words in (("parts", 2, ("optimizer.states=host",)), ("parts", 4, ()), ("whole", 4, ())):
        outcomes = drawloom(tmp_path, *common, f"trainer.steps={steps}", f"run.name={name}", *words, ranks=2)
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].text
    parts, whole = (series(tmp_path / "runs" / name, *LEARNED) for name in ("parts", "whole"))
    assert parts == whole and len(parts) == 4
