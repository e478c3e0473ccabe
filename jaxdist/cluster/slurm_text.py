"""The shell code of a Slurm job script, which follows the values of the run (`slurm.Script`).

`slurm.Script` fills in the names in braces. A user who can write to the run folder must gain nothing by it: the files
there are read as numbers or not at all, and are written under new names.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.cluster.process_env import FIRST_PORT, PORTS

BODY = r"""
# Variables of the login shell must not reach the tasks.
unset {inherited}
{environment}{coordinator}
# Slurm sends USR1 before the time limit, to this shell only. scancel passes it on to the tasks, which save and end with
# {stopped}; srun would answer the signal by killing them. TERM goes to all, when Slurm itself ends or requeues the job.
asked= ended=
trap 'asked=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'ended=yes' TERM

say() { echo "jaxdist.launch: job $SLURM_JOB_ID: $*"; }

# Anybody may have written a file or its name: where bash expects a number, it would run the command in `a[$(...)]`.
is_number() { [[ $1 =~ ^(0|[1-9][0123456789]{0,9})$ ]]; }

put() { # put FILE WORDS: write a new file and rename it to FILE; a link that somebody left there is not followed.
    local new
    new=$(mktemp "$1.XXXXXX") || return
    if echo "${*:2}" >"$new" && mv -fT "$new" "$1"; then return 0; fi
    rm -f "$new"
    return 1
}

look() { # set newest to the step of the newest checkpoint
    newest=0
    for sums in "$run"/checkpoints/sums/*.json; do
        at=${sums##*/} at=${at%.json}
        if [ -e "$sums" ] && is_number "$at" && [ "$at" -gt "$newest" ]; then newest=$at; fi
    done
}

if [ -L "$run/slurm" ]; then say "$run/slurm is a symbolic link, which is not followed: remove it"; exit {refused}; fi
mkdir -p "$run/slurm"
state=$run/slurm/$SLURM_JOB_ID

# How often in a row the job has failed without a new checkpoint, and the newest checkpoint at that time.
look
failures=0 before=$newest
if [ -f "$state.failures" ] && [ ! -L "$state.failures" ]; then
    read -r failures before < <(head -c 40 "$state.failures")
    if ! is_number "$failures" || ! is_number "$before"; then failures=0 before=$newest; fi
fi
{resume}
# --wait, not --kill-on-bad-exit: that would kill tasks that still save, and hide the exit code behind its signal.
# The exit code comes through a pipe: a signal interrupts bash's `wait`, which may then lose it.
exec 3>&1
start() { # set code to the exit code of the run
    exec 4< <(
        trap : TERM
        srun --ntasks-per-node="$tasks" --export=ALL --kill-on-bad-exit=0 --wait={last_words} "${srun[@]}" \
            {command} >&3 3>&-
        echo $?
    )
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    read -r code <&4
    is_number "$code" || code=1
}

# {busy}: another run uses the folder, often an earlier start of this job that has not quite ended. That is no failure.
# The job waits here: requeued, it would have to wait for its nodes again, perhaps for days.
start
since=$SECONDS
if [ "$code" = {busy} ]; then
    say "the run folder is in use, as the message above says; tried again every $pause s, for $patience s at most"
fi
while [ "$code" = {busy} ]; do
    again=$((SECONDS + pause))
    while [ "$SECONDS" -lt "$again" ] && [ -z "$asked$ended" ]; do sleep 1; done
    if [ -n "$asked$ended" ]; then say "asked to stop while the run folder was in use"; exit {busy}; fi
    if [ "$SECONDS" -ge $((since + patience)) ]; then
        say "the run folder is still in use: submit it again"
        exit {busy}
    fi
    start
done

if [ "$code" = {done} ]; then say "done"; exit {done}; fi
if [ -n "$ended" ]; then say "ended by Slurm (exit code $code)"; exit "$code"; fi
{final}
look
if [ "$newest" != "$before" ]; then failures=0; fi
if [ "$newest" = "$before" ] || [ "$code" != {stopped} ]; then failures=$((failures + 1)); fi
if [ "$failures" -gt "$restarts" ]; then
    say "exit code $code; given up: $failures times in a row, without a new checkpoint"
    exit "$code"
fi
if ! put "$state.failures" "$failures $newest"; then
    say "exit code $code; $state.failures, which counts the failures, cannot be written: submit it again"
    exit "$code"
fi
say "exit code $code; requeued{onward}"
scontrol requeue "$SLURM_JOB_ID" && exit {done}
case $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") in
PENDING | COMPLETING) exit {done} ;; # Slurm itself has requeued it, as after the loss of a node
esac
say "it cannot be requeued: submit it again"
exit "$code"
"""


class Kind(NamedTuple):
    """The parts of the body that differ between train and a user's own script; names in braces are filled in later."""

    command: str
    """The words of the program, and how srun shows what they print."""
    final: str
    """The line that ends the job for good after some exit codes."""
    onward: str
    """Where the program goes on, in a message."""


TRAIN = Kind(
    command='"${program[@]}" --run-dir="$run" --resume="$resume"',
    final='if [ "$code" = {refused} ]; then say "the request was refused: that is not tried again"; exit {refused}; fi',
    onward=', to continue from $([ "$newest" = 0 ] && echo the beginning || echo "step $newest")',
)

OWN_SCRIPT = Kind(
    command='--label env PYTHONUNBUFFERED=1 {grace} "${program[@]}"',
    final="""\
# Codes from 2 are results of the script, except {stopped} and those of signals, from 128.
if [ "$code" -ge 2 ] && [ "$code" -lt 128 ] && [ "$code" != {stopped} ]; then
    say "exit code $code: that is not tried again"
    exit "$code"
fi""",
    onward='$([ "$newest" = 0 ] || echo "; the newest checkpoint is that of step $newest")',
)

CHOOSE_COORDINATOR = f"""\
# The tasks would ask scontrol for the first node, but a container may not have it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${{JAX_COORDINATOR_PORT:-$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))}}
if [ $((SLURM_JOB_NUM_NODES * tasks)) != 1 ]; then export JAX_COORDINATOR_ADDRESS=$first:$port; fi
"""

RESUME = {
    "auto": "resume=auto\n",
    "never": "resume=auto # only the first start requires an empty folder\n"
    'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then resume=never; fi\n',
}

GO_BACK = """
# Go back to step {step}, unless an earlier start of this job did: then the newest checkpoint of before is gone, or new.
resume=auto
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && ! put "$state.began"; then say "$state.began cannot be written"; exit 1; fi
old=$run/checkpoints/sums/{newest}.json
if [ -e "$old" ] && [ ! "$old" -nt "$state.began" ]; then resume={step}; fi
"""
