"""continue a prompt with a run's newest weights"""

import argparse
from pathlib import Path

from drawloom.components.commands._trained import trained
from drawloom.components.distributed.rng import generator
from drawloom.components.sampling.generate import Sampler
from drawloom.graph.cli.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, help="such as runs/first_run")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to draw at most (default 200)")
    parser.add_argument("--context", type=int, default=256, help="how many tokens back the model looks (default 256)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest each time (default 0.8)")
    parser.add_argument("--top-k", type=int, default=None, help="draw from this many likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default 0)")


def main(options: argparse.Namespace, project: Project) -> int:
    """Print the prompt and its continuation."""
    with trained(project, options.run_folder) as run:
        sampler = Sampler(
            model=run.predictor,
            pipeline=run.mesh.group("pipeline"),
            generator=generator(options.seed, "sample"),
            end=run.tokenizer.eos_id,
            context=options.context,
            temperature=options.temperature,
            top_k=options.top_k,
        )
        prompt = [int(token) for token in run.tokenizer.encode(options.prompt)] or [run.tokenizer.eos_id]
        print(options.prompt + run.tokenizer.decode(list(sampler.continued(prompt, options.tokens))))
    return 0
