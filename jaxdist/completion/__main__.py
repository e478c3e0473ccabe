"""`python -m jaxdist.completion bash`, `zsh` or `fish`: print the script that completes jaxdist in that shell."""

from __future__ import annotations

import sys

from jaxdist.config import RequestError, nearest
from jaxdist.request import arguments, run

SHELLS = {
    "bash": "print the script for bash",
    "zsh": "print the script for zsh",
    "fish": "print the script for fish",
}

USAGE = """usage: jaxdist completion SHELL   (or python -m jaxdist.completion SHELL)

Prints a script for a shell: TAB then completes commands, options, their values, shipped configs and clusters, and
paths, after jaxdist and after python -m jaxdist. Let the shell read it when it starts:

  bash   eval "$(jaxdist completion bash)"     in ~/.bashrc
  zsh    eval "$(jaxdist completion zsh)"      in ~/.zshrc, after compinit
  fish   jaxdist completion fish | source      in ~/.config/fish/config.fish"""


def main(argv: list[str] | None = None) -> int:
    """Print the script for the shell that the first word names. Return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    shell, *rest = argv
    if shell not in SHELLS:
        raise RequestError(f"there is no completion for '{shell}'; {nearest(shell, SHELLS)}")
    arguments(rest, f"completion {shell}", f"Completion in {shell}: {SHELLS[shell]}.", positional=None, knobs=())

    # Imported late, because it imports every other command.
    from jaxdist.completion.scripts import script
    from jaxdist.completion.table import commands

    print(script(shell, commands()), end="")
    return 0


if __name__ == "__main__":
    run(main)
