"""A step's forward and backward passes, repeated if experts had more rows than room."""

import torch

from drawloom import Every
from drawloom.ports import LOSSES, Executor, Parameters, PassObserver, RowLimit, StepState


def run_passes_until_rows_fit(
    state: StepState,
    executor: Executor,
    parameters: Parameters,
    limits: Every[RowLimit],
    observers: Every[PassObserver],
) -> None:
    """
    Run the forward and backward passes, and repeat them until no rank has dropped rows.

    Before a repetition, gradients, losses and observed values are dropped, and torch's generators set back.
    """
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    executor.run_forward_and_backward(state)
    while sum(limit.grow_if_rows_were_dropped() for limit in limits.values()):  # all of them: they are collectives
        parameters.sum_remaining_gradients()  # ends the sums that run in the background
        for _, parameter in parameters.named_parameters():
            parameter.grad = None
        state.drop(LOSSES)
        for observer in observers.values():
            observer.forget_passes()
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        executor.run_forward_and_backward(state)
