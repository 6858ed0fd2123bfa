"""continue a prompt with a run's weights"""

import argparse

from drawloom.components.commands._options import integer_parser, parse_temperature
from drawloom.components.commands._trained import add_run_arguments, open_trained
from drawloom.components.distributed.rng import create_generator
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.pipeline import Predictor
from drawloom.components.sampling.generate import Sampler
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    add_run_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="text to continue")
    parser.add_argument(
        "--tokens", type=integer_parser(), default=200, metavar="N", help="most tokens to sample (default: 200)"
    )
    parser.add_argument(
        "--context", type=integer_parser(), default=256, metavar="N", help="most tokens the model sees (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        type=parse_temperature,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=integer_parser(), metavar="K", help="sample only from the K most likely tokens (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for sampling (default: 0)")


@output_class
class GenerateResult(Result):
    """Sampled text."""

    step: int = output("step of the checkpoint")
    prompt: str = output("prompt")
    continuation: str = output("sampled text after the prompt")

    def render(self, format: str) -> str:
        """Return the prompt and its continuation."""
        return self.prompt + self.continuation


def main(options: argparse.Namespace, project: Project) -> GenerateResult:
    """Sample a continuation of the prompt."""
    with open_trained(project, options, Predictor, Tokenizer, Mesh) as (run, step):
        tokenizer = run.get(Tokenizer)
        sampler = Sampler(
            model=run.get(Predictor),
            pipeline=run.get(Mesh).pipeline_group,
            generator=create_generator(options.seed, "sample"),
            end=tokenizer.eos_id,
            context=options.context,
            temperature=options.temperature,
            top_k=options.top_k,
        )
        # An empty prompt starts like a document: after the end of the previous one.
        prompt = [int(token) for token in tokenizer.encode(options.prompt)] or [tokenizer.eos_id]
        text = tokenizer.decode(list(sampler.sample_continuation(prompt, options.tokens)))
    return GenerateResult(step, options.prompt, text)
