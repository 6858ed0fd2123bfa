"""A run's model through the interface of lm-eval-harness, on a model that is a table."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.data.bytes import Bytes
from drawloom.components.ports.model import TokenContext
from drawloom.graph import UserError

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from drawloom.components.commands.models._lm_eval_model import RunModel

TABLE = torch.randn(257, 257, generator=torch.Generator().manual_seed(0)) + 5 * torch.eye(257).roll(1, 1)
"""The likeliest token is the next letter."""


class Table:
    """A model whose logits depend on the token, and on positions above 3."""

    def __init__(self) -> None:
        self.longest = 0

    def infer(self, tokens: Tensor, shared: TokenContext) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        return TABLE[tokens] + (shared.positions > 3)[..., None] * torch.arange(257) / 100


class Alone:
    """A group of one."""

    size = 1

    def sum(self, tensor: Tensor) -> None: ...


def model(context: int = 8, rows: int = 2) -> Any:
    return RunModel(Table(), Bytes(), Alone(), context, rows)  # type: ignore[arg-type]


def request(kind: str, *words: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=words, idx=0)


def by_hand(ids: list[int], count: int) -> float:
    """Return the log-likelihood of the last ids given the ids before them, for texts within the context."""
    logits = Table().infer(torch.tensor([ids[:-1]]), TokenContext(torch.arange(len(ids) - 1)[None], torch.zeros(1)))[0]
    picked = logits.double().log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
    return float(picked[-count:].sum())


def test_answers_are_in_the_order_of_requests() -> None:
    """Texts with different lengths may be batched in any way; one without a context begins after an end token."""
    pairs = [("ab", "cde"), ("", "xy"), ("a", "b"), ("abc", "d")]
    answers = model().loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    wanted = [by_hand([*(one.encode() or [256]), *other.encode()], len(other)) for one, other in pairs]
    assert [total for total, _ in answers] == pytest.approx(wanted, rel=1e-5)
    greedy = [request("loglikelihood", "a", text) for text in ("bcd", "bce")]
    assert [likeliest for _, likeliest in model().loglikelihood(greedy, disable_tqdm=True)] == [True, False]


class Begun(Bytes):
    """Bytes after two ids, like GLM-4's."""

    prefix_ids = (1, 2)


def test_texts_begin_with_the_ids_of_the_tokenizer() -> None:
    """Contexts, answers without a context, and whole texts are scored after `prefix_ids`."""
    made = RunModel(Table(), Begun(), Alone(), 9, 2)  # type: ignore[arg-type]
    pairs = [("ab", "cd"), ("", "xy")]
    answers = made.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    wanted = [by_hand([1, 2, *one.encode(), *other.encode()], 2) for one, other in pairs]
    assert [total for total, _ in answers] == pytest.approx(wanted, rel=1e-5)
    (whole,) = made.loglikelihood_rolling([request("loglikelihood_rolling", "abcd")])
    assert whole == pytest.approx(by_hand([1, 2, *b"abcd"], 4), rel=1e-5)
    prompts = [made.tok_encode(text) for text in ("", "a")]
    assert prompts == [[1, 2], [1, 2, 97]]


def test_the_model_sees_no_more_than_its_context() -> None:
    """The model sees the end of long texts; in rolling windows every token is scored once."""
    made = model(context=5)
    (long,) = made.loglikelihood([request("loglikelihood", "abcdefg", "hi")], disable_tqdm=True)
    assert long[0] == pytest.approx(by_hand([*b"defghi"], 2), rel=1e-5)
    (whole,) = made.loglikelihood_rolling([request("loglikelihood_rolling", "abcdefgh")])
    assert whole == pytest.approx(by_hand([256, *b"abcde"], 5) + by_hand([*b"cdefgh"], 3), rel=1e-5)
    assert made.predictor.longest == 5


def test_text_ends_where_a_task_says() -> None:
    """The text ends before its first stop string; options without a meaning for the sampler are refused."""
    made = model(context=64)
    (text,) = made.generate_until([request("generate_until", "a", {"until": [], "max_gen_toks": 12})])
    assert text == "bcdefghijklm"
    (cut,) = made.generate_until([request("generate_until", "a", {"until": ["hi", "ef"], "max_gen_toks": 12})])
    assert cut == "bcd"
    with pytest.raises(UserError, match="a task sets top_p for generation, and only do_sample"):
        made.generate_until([request("generate_until", "a", {"top_p": 0.5})])
    with pytest.raises(UserError, match="the context has no room for a task's 64 tokens; write --context 65 or more"):
        made.generate_until([request("generate_until", "a", {"max_gen_toks": 64})])
