"""Training in bfloat16 alone, with stochastic rounding."""

from pathlib import Path

from support.runs import drawloom, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")


def test_a_resumed_run_has_the_same_rounding_noise(tmp_path: Path) -> None:
    """A resumed run has the bits of an uninterrupted run's losses, also if its state was in host memory before."""
    write_corpus(tmp_path)
    (tmp_path / "rounded.toml").write_text(
        'extends = "./tiny.toml"\n[precision]\nparameter = "bfloat16"\n[optimizer]\nuse = "optim.stochastic_adamw"\n'
        "lr = 4e-3\n[lr]\nstart = 1.0\nphases = [{ to = 1.0, steps = 1 }]\n",
        "utf-8",
    )
    common = ["run", "rounded.toml", "trainer.on_finish=[]", "evaluate.every='last'"]
    for steps, words in ((2, ("optimizer.states=host", "optimizer.slot_bytes=4096")), (5, ())):
        assert drawloom(tmp_path, *common, f"trainer.steps={steps}", "run.name=parts", *words)[0].code == 0
    assert drawloom(tmp_path, *common, "trainer.steps=5", "run.name=whole")[0].code == 0
    runs = tmp_path / "runs"
    assert series(runs / "parts", *LEARNED) == series(runs / "whole", *LEARNED)
