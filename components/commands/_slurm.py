"""SLURM array scripts for a sweep."""

import shlex
from collections.abc import Sequence
from pathlib import Path

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{limit}
#SBATCH --output={output}
#SBATCH --signal=B:TERM@120
{options}\
# Run {count} points of a sweep; submit it again to resume unfinished runs.
commands=(
{commands}
)
cd {here}
trap 'kill -TERM "$child"' TERM  # the run saves its step, and ends
eval "exec ${{commands[$SLURM_ARRAY_TASK_ID]}}" &  # exec: the child is the run itself
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal has interrupted the wait
  wait "$child"
  code=$?
done
exit $code
"""


def format_array_script(
    name: str,
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    max_parallel_tasks: int | None,
    options: Sequence[str],
) -> str:
    """Return a script for `sbatch` with a command per array task, `max_parallel_tasks` of them together."""
    return SCRIPT.format(
        name=name.replace(" ", "_"),
        last=len(commands) - 1,
        limit=f"%{max_parallel_tasks}" if max_parallel_tasks else "",
        output=shlex.quote(str(folder.absolute() / "slurm-%A_%a.txt")),  # sbatch reads quotes as a shell does
        options="".join(f"#SBATCH {option}\n" for option in options),
        count=len(commands),
        commands="\n".join(f"  {shlex.quote(shlex.join(command))}" for command in commands),
        here=shlex.quote(str(Path.cwd())),
    )
