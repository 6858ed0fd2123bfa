"""Training in bfloat16 alone, with stochastic rounding."""

from pathlib import Path

import pytest

from support.runs import drawloom, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")


def test_a_resumed_run_has_the_same_rounding_noise(tmp_path: Path) -> None:
    """
    A resumed run has the bits of an uninterrupted run's losses, also if its state was in host memory before, with
    activations in 8 bits.
    """
    write_corpus(tmp_path)
    (tmp_path / "rounded.toml").write_text(
        'extends = "./tiny.toml"\n[precision]\nparameter = "bfloat16"\n[optimizer]\nuse = "optim.stochastic_adamw"\n'
        "lr = 4e-3\n[lr]\nstart = 1.0\nphases = [{ to = 1.0, steps = 1 }]\n",
        "utf-8",
    )
    common = ["run", "rounded.toml", "trainer.on_finish=[]", "evaluate.every='last'", "stages.recompute=quantized"]
    for steps, words in ((2, ("optimizer.states=host", "optimizer.slot_bytes=4096")), (5, ())):
        assert drawloom(tmp_path, *common, f"trainer.steps={steps}", "run.name=parts", *words)[0].code == 0
    assert drawloom(tmp_path, *common, "trainer.steps=5", "run.name=whole")[0].code == 0
    runs = tmp_path / "runs"
    assert series(runs / "parts", *LEARNED) == series(runs / "whole", *LEARNED)


def test_means_of_8_bits_resume_on_other_ranks(tmp_path: Path) -> None:
    """A checkpoint with 8-bit means continues on two shards, with the state in host memory, with close losses."""
    write_corpus(tmp_path)
    (tmp_path / "small.toml").write_text(
        'extends = "./tiny.toml"\n[precision]\nparameter = "bfloat16"\n[optimizer]\nuse = "optim.stochastic_adamw"\n'
        'state_dtype = "uint8"\nsplit_master_weights = true\nlr = 4e-3\n[batch]\nmicro_size = 1\n'
        "[lr]\nstart = 1.0\nphases = [{ to = 1.0, steps = 1 }]\n",
        "utf-8",
    )
    common = ["run", "small.toml", "trainer.on_finish=[]", "evaluate.every='last'"]
    for name, steps, ranks, words in (
        ("parts", 2, 1, ()),
        ("parts", 5, 2, ("mesh.data_shard=2", "optimizer.states=host")),
        ("whole", 5, 1, ()),
    ):
        words = (*words, f"trainer.steps={steps}", f"run.name={name}")
        outcomes = drawloom(tmp_path, *common, *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    parts, whole = (series(tmp_path / "runs" / name, "loss") for name in ("parts", "whole"))
    assert len(parts) == 5 and [loss for (loss,) in parts] == pytest.approx([loss for (loss,) in whole], rel=1e-3)
