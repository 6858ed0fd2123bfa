"""
Run the self-check in `model.transformers` for all types in transformers with a causal LM.

`python -m benchmarks.transformers_types` writes the table in docs/transformers_types.md, in five minutes on two cores;
with type names it prints their verdicts. Every type has its own process, with a limit on time and memory.
"""

import multiprocessing
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.model.fallback.checks import run_self_check
from drawloom.components.model.fallback.module import SelfCheckError, register_attention

PAGE = Path(__file__).parents[2] / "docs" / "transformers_types.md"
MAX_SECONDS = 120
MAX_BYTES = 16 * 2**30
PASSES, ONE_STAGE = "passes", "passes, in one pipeline stage"

RESULTS = {
    PASSES: "passes all checks",
    ONE_STAGE: "passes, but has no pipeline: two stages do not compute what one does",
    "keyword": "attention is not computed by transformers' attention functions, or builds masks of its own",
    "packing": "documents in a row see each other, mostly by a recurrent state",
    "head": "the head is more than a linear layer and a function of its logits",
    "weights": "parameters can't be written to a folder and read again one by one",
    "layers": "there is no list of `num_hidden_layers` layers in a base model",
    "build": "transformers does not build or run the type's default config with small sizes",
    "limit": f"the check takes more than {MAX_SECONDS} s or {MAX_BYTES // 2**30} GiB",
}
"""Verdicts in the order of the table."""

HEADER = """\
# Types of transformers

`python -m benchmarks.transformers_types` in `tests/` writes this table: the result of the
[self-check](families.md#any-causal-language-model-of-transformers) of `model.transformers` for the default config of
every type with a causal language model in transformers {version}. A folder may have other flags than its type's
default; its own config decides.

{counts}

| result | | types |
|-|-|-|
"""


@attrs.frozen
class Verdict:
    """A type's result, a key in RESULTS, and the reason."""

    result: str
    reason: str = ""


def causal_types() -> list[str]:
    """Return the model types with a causal LM in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def verdict_of(model_type: str) -> Verdict:
    """Run the self-check for a type's default config."""
    try:
        fault = run_self_check(default_config(model_type)).no_stages
    except SelfCheckError as error:
        return Verdict(error.check, error.reason)
    except Exception as error:
        return Verdict("build", f"{type(error).__name__}: {error}".partition("\n")[0])
    return Verdict(ONE_STAGE, fault) if fault else Verdict(PASSES)


def default_config(model_type: str) -> Any:
    """Return a type's default config; nulls that released models do not have become numbers."""
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(model_type)
    values = config.to_dict()
    heads = values.get("num_attention_heads")
    missing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    if isinstance(heads, int):
        missing |= {"head_dim": values["hidden_size"] // heads, "num_key_value_heads": heads}
    null = {key: value for key, value in missing.items() if values.get(key, value) is None}
    return type(config).from_dict(values | null) if null else config


def scan(types: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Yield every type's verdict, from a forked process."""
    register_attention()  # before forks: it imports transformers
    context = multiprocessing.get_context("fork")
    for model_type in types:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_verdict, args=(model_type, sender))
        process.start()
        sender.close()
        try:
            verdict = receiver.recv() if receiver.poll(MAX_SECONDS) else Verdict("limit", "no result in time")
        except EOFError:
            verdict = Verdict("limit", "the process was killed")
        process.kill()
        process.join()
        yield model_type, verdict


def _send_verdict(model_type: str, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    try:
        sender.send(verdict_of(model_type))
    except MemoryError:
        sender.send(Verdict("limit", "out of memory"))


def page(verdicts: Sequence[tuple[str, Verdict]]) -> str:
    """Return the page with a row for each result."""
    import transformers

    by_result = {result: [name for name, verdict in verdicts if verdict.result == result] for result in RESULTS}
    passing = len(by_result[PASSES]) + len(by_result[ONE_STAGE])
    counts = f"{passing} of {len(verdicts)} types pass."
    rows = [
        f"| {result} | {len(types)}: {RESULTS[result]} | {', '.join(f'`{name}`' for name in types)} |\n"
        for result, types in by_result.items()
        if types
    ]
    return HEADER.format(version=transformers.__version__, counts=counts) + "".join(rows)


def main(types: Sequence[str] = ()) -> None:
    """Print a line for each type; for all types, write the page."""
    verdicts = []
    for model_type, verdict in scan(types or causal_types()):
        print(f"{verdict.result:30} {model_type:24} {verdict.reason}", flush=True)
        verdicts.append((model_type, verdict))
    if not types:
        PAGE.write_text(page(verdicts), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
