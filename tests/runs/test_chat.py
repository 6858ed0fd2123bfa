"""Chat with runs and with exported folders, and chat samples."""

import io
import json
from pathlib import Path

import pytest
import transformers

from drawloom.graph.cli.main import main
from support.chat import CHATML, say, tokenizer_folder
from support.runs import QWEN3, drawloom

SETTINGS = """
device.share = true
stages.adapters = []
batch = { global_size = 4, micro_size = 4 }
evaluate.every = 40
optimizer.lr = 1e-2
sample = { chat = "@prompts", prompt = "hello", temperature = 0.0, tokens = 20 }
"""
MODEL = SETTINGS + QWEN3 + "max_position_embeddings = 64\n"
SFT = 'extends = "chat"\ntrainer = { steps = 40, on_finish = ["@export", "@sample"] }\n' + MODEL
PREFERENCES = 'extends = "dpo"\nloss.use = "loss.simpo"\ntrainer = { steps = 1, on_finish = ["@sample"] }\n' + MODEL


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run trained to answer two messages."""
    lab = tmp_path_factory.mktemp("chat")
    tokenizer_folder(lab / "base")
    lines = [{"messages": say("hello", "good day é", "there", "hello user")}] * 20
    (lab / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    (lab / "sft.toml").write_text(SFT, "utf-8")
    words = ("run.name=sft", "vars.base=base", "vars.length=64", 'tokens.paths=["mine.jsonl"]')
    (outcome,) = drawloom(lab, "run", "sft.toml", *words)
    assert outcome.code == 0, outcome.text
    return lab


def chat(lab: Path, monkeypatch: pytest.MonkeyPatch, stdin: str, *words: str) -> int:
    """Chat greedily, with messages from standard input."""
    monkeypatch.chdir(lab)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    return main(["generate", words[0], "--chat", "--temperature", "0", *words[1:]])


def test_runs_and_exports_answer_several_messages(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Answers end at the template's end of a turn, see earlier turns, and are the ones of transformers.

    The export's generation_config.json has the ends: transformers stops there without further settings.
    """
    for folder in ("runs/sft", "runs/sft/export"):
        assert chat(lab, monkeypatch, "hello\n\nthere\n", folder) == 0
        assert capsys.readouterr().out == "good day é\nhello user\n"
    assert chat(lab, monkeypatch, "", "runs/sft", "--system", "good", "--prompt", "hello", "--format", "json") == 0
    *messages, answer = json.loads(capsys.readouterr().out)["messages"]
    assert messages == [{"role": "system", "content": "good"}, {"role": "user", "content": "hello"}]
    export = lab / "runs/sft/export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, end]
    theirs = model.generate(ids, max_length=64, do_sample=False, pad_token_id=end)
    assert int(theirs[0, -1]) == end and theirs.shape[1] < 64
    assert answer["content"] == tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)


def test_exports_have_the_template_and_ends_of_the_conversations(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    A run with a template of its own exports this one, not the base's, as `drawloom export` does without the data.

    A conversation with the run has the answers of one with the export.
    """
    text = CHATML.replace("message.role", "message.role | upper").replace(">assistant", ">ASSISTANT")
    (lab / "own.jinja").write_text(text.replace("<|im_end|>", "<|eot|>"), "utf-8")
    (lab / "gone.jsonl").write_text((lab / "mine.jsonl").read_text("utf-8"), "utf-8")
    words = ("run.name=own", "vars.base=base", "vars.length=64", 'tokens.paths=["gone.jsonl"]', "trainer.steps=1")
    (outcome,) = drawloom(lab, "run", "sft.toml", *words, "tokens.template=own.jinja")
    assert outcome.code == 0, outcome.text
    for name in ("own.jinja", "gone.jsonl"):
        (lab / name).rename(lab / f"{name}.moved")
    (outcome,) = drawloom(lab, "export", "runs/own", "--to", "later")
    assert outcome.code == 0, outcome.text
    for export in (lab / "runs/own/export", lab / "later"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(export)
        assert tokenizer.chat_template == text.replace("<|im_end|>", "<|eot|>")
        ends = json.loads((export / "generation_config.json").read_text("utf-8"))["eos_token_id"]
        assert tokenizer.convert_tokens_to_ids("<|eot|>") in ends
    answers = []
    for folder in ("runs/own", "later"):
        assert chat(lab, monkeypatch, "hello\n", folder, "--tokens", "20") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_impossible_chats_are_refused(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long conversation, a missing template, and options without effect have one message each."""
    (lab / "runs/plain").mkdir(exist_ok=True)
    for path in (lab / "runs/sft/export").iterdir():
        if path.name != "chat_template.jinja":
            (lab / "runs/plain" / path.name).write_bytes(path.read_bytes())
    cases = [
        ("runs/sft", ["--prompt", "x" * 99], "tokens, and the model sees 64; start another one"),
        ("runs/plain", ["--prompt", "x"], "the tokenizer has no chat template"),
        ("runs/sft", ["--prompt", "x", "--context", "65"], "--context: 65 is more than the model's 64 positions"),
        ("runs/plain", ["--prompt", "x", "--best"], "runs/plain is a model folder without checkpoints"),
    ]
    for folder, words, message in cases:
        assert chat(lab, monkeypatch, "", folder, *words) in (1, 2), message
        assert message in capsys.readouterr().err
    for words, message in ((["--system", "x", "--prompt", "x"], "add --chat"), ([], "add --prompt TEXT, or --chat")):
        assert main(["generate", "runs/sft", *words]) == 2
        assert message in capsys.readouterr().err


def test_samples_of_supervised_and_preference_runs_are_answers(lab: Path) -> None:
    """The sample shows the message with the model's answer."""
    assert (lab / "runs/sft/sample.txt").read_text("utf-8") == "# after step 40\nuser: hello\nassistant: good day é\n"
    pairs = [{"chosen": say("hello", "there"), "rejected": say("hello", "good")}] * 20
    (lab / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), "utf-8")
    (lab / "dpo.toml").write_text(PREFERENCES, "utf-8")
    words = ("run.name=dpo", "vars.base=base", "vars.length=64", 'tokens.paths=["pairs.jsonl"]')
    (outcome,) = drawloom(lab, "run", "dpo.toml", *words)
    assert outcome.code == 0, outcome.text
    assert "\nuser: hello\nassistant: " in (lab / "runs/dpo/sample.txt").read_text("utf-8")
