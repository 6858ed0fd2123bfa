"""Contracts of ports: a module per module of ports, and a function per property that implementations must have."""

FRAMEWORK_ONLY = {
    "FrozenModel": "it has weights and stages on the ranks of a run, so runs test it",
    "DescribedStages": "its phrases are about a run's model and features, so runs test it",
    "PassFeature": "it acts around the programs of an executor, so runs test it",
    "RepeatingExecutor": "it repeats the passes of a run's step, so runs test it",
    "PassObserver": "it observes the passes of a run's step, so runs test it",
    "RowLimit": "it needs several ranks with different tokens, so runs test it",
    "HybridKernels": "it adds nothing to RecurrentKernels and ExpertKernels, whose contracts its kernels keep",
    "EndsAnswers": "its ids belong to a chat template and a tokenizer of the run, so runs test it",
    "RewardEvaluation": "its completions and rewards are those of a run's other components, so runs test it",
    "TeacherPredictions": "it belongs to the rows of one packing, so runs test it",
    "Scorer": "its hidden states have a width that only the run's model knows, so runs test it",
    "Timed": "it changes the timeouts of process groups and ends processes, so only the owner of both can implement it",
}
"""Ports that plugins can't implement and that have no contract, with the reason."""
