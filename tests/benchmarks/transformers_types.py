"""Scan of transformers: `python -m benchmarks.transformers_types [TYPE ...]` checks causal LMs by default configs."""

import sys
import warnings
from collections import Counter
from typing import Any

from drawloom.components.model.fallback.checks import self_check
from drawloom.components.model.fallback.errors import SelfCheckError


def causal_types() -> list[str]:
    """Return the model types with a causal LM in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def verdict_of(model_type: str) -> tuple[str, str]:
    """Return "passes", "one stage only" or the failed check's name for a type's default config, and the reason."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.for_model(model_type)
        fault = self_check(config).no_stages
    except SelfCheckError as error:
        return error.check, error.reason
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}".partition("\n")[0]
    return ("one stage only", fault) if fault else ("passes", "")


def main(types: list[str]) -> None:
    """Print a line for each type, and the number of types by verdict."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for model_type in types or causal_types():
        verdict, reason = verdict_of(model_type)
        counts[verdict] += 1
        print(f"{verdict:14} {model_type:24} {reason}", flush=True)
    print(*(f"{count} {verdict}" for verdict, count in counts.most_common()), sep=", ")


if __name__ == "__main__":
    main(sys.argv[1:])
