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
{environment}
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

look() { # look [STEP]: set newest to the step of the newest checkpoint, or to that of the newest one before STEP
    newest=0
    for sums in "$run"/checkpoints/sums/*.json; do
        at=${sums##*/} at=${at%.json}
        if [ -e "$sums" ] && is_number "$at" && [ "$at" -gt "$newest" ] && [ "$at" -lt "${1:-10000000000}" ]; then
            newest=$at
        fi
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
old=
goes_back() { [ -e "$old" ] && ! [ "$old" -nt "$state.began" ]; } # whether the run has to go back, and has not yet
{resume}{where}{nodes}
# --wait, not --kill-on-bad-exit: that would kill tasks that still save, and hide the exit code behind its signal.
# The exit code comes through a pipe: a signal interrupts bash's `wait`, which may then lose it.
exec 3>&1
start() { # set code to the exit code of the run
{coordinator}    exec 4< <(
        trap : TERM
        srun "${place[@]}" --ntasks-per-node="$tasks" --export=ALL --kill-on-bad-exit=0 --wait={last_words} \
            "${srun[@]}" {command} >&3 3>&-
        echo $?
    )
    child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    read -r code <&4
    is_number "$code" || code=1
}

{choose}
attempt() { # make a start; return where the job may be tried again, and end it otherwise
    # {busy}: another run uses the folder, often an earlier start of this job that has not quite ended. That is no
    # failure. The job waits here: requeued, it would have to wait for its nodes again, perhaps for days.
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
        # Slurm may end the job while the file is written, and requeues it itself, as after the loss of a node.
        if [ -n "$ended" ]; then say "ended by Slurm (exit code $code)"; exit "$code"; fi
        say "exit code $code; $state.failures, which counts the failures, cannot be written: submit it again"
        exit "$code"
    fi
    note_bad
}
attempt
{again}say "exit code $code; requeued{onward}"
if scontrol requeue "$SLURM_JOB_ID"; then
    exclude
    exit {done}
fi
case $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") in
PENDING | COMPLETING) # Slurm itself has requeued it, as after the loss of a node
    exclude
    exit {done}
    ;;
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
    final="""\
    if [ "$code" = {refused} ]; then say "the request was refused: that is not tried again"; exit {refused}; fi""",
    onward=", to continue from $(onward)",
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

ONWARD = r"""
diverged() { # set first to the step of run.json from which the run has diverged (`training.rollback`); fail without
    [ -f "$run/run.json" ] && [ ! -L "$run/run.json" ] || return
    [[ $(head -c 1048576 "$run/run.json" | tr -cd '[:print:]') =~ '"diverged": {"first": '([0123456789]+), ]] || return
    first=${BASH_REMATCH[1]}
    is_number "$first"
}
onward() { # print from where the next start of train continues: it may go back, by request or before it diverged
    local first newest=$newest before=
    if goes_back; then
        newest=$back
    elif $rolls_back && diverged; then
        look "$first"
        before=", before it diverged at step $first"
    fi
    if [ "$newest" = 0 ]; then echo "the beginning$before"; else echo "step $newest$before"; fi
}
"""

CHOOSE_COORDINATOR = f"""\
    # The tasks would ask scontrol for the first node, but a container may not have it.
    local first=${{nodes[0]}} count=${{#nodes[@]}}
    local port=${{JAX_COORDINATOR_PORT:-$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))}}
    if [ -z "$first" ]; then
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) count=$SLURM_JOB_NUM_NODES
    fi
    if [ $((count * tasks)) != 1 ]; then export JAX_COORDINATOR_ADDRESS=$first:$port; fi
"""

NODES = r"""
# Nodes that the run or the doctor has named as bad (RUN/heartbeats/named.txt, with the reasons) are excluded from the
# next start of the job. Only names of nodes that the job has are taken from that file.
named=$run/heartbeats/named.txt
lines() { if [ -f "$named" ] && [ ! -L "$named" ]; then wc -l <"$named"; else echo 0; fi; }
seen=$(lines) bad=" "
note_bad() { # add the nodes that have been named since the start to bad
    local host reason node
    [ "$(lines)" -gt "$seen" ] || return
    local all=" $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ') "
    while read -r host _ reason; do
        for node in "$host" "${host%%.*}"; do
            case $node in *[!A-Za-z0-9._-]* | "") continue ;; esac
            case "$all" in *" $node "*) ;; *) continue ;; esac
            case "$bad" in *" $node "*) ;; *) bad="$bad$node " && say "node $node was named: $reason" ;; esac
        done
    done < <(tail -n +$((seen + 1)) "$named" | head -c 65536 | tr -cd '[:print:]\n')
    seen=$(lines)
}
exclude() { # exclude the nodes in bad from the next start, if enough others are left
    [ "$bad" != " " ] || return
    local list number have try
    list=$(squeue --noheader --format=%x --jobs="$SLURM_JOB_ID")
    case $list in "(null)") list= ;; esac
    list=$(echo $list $bad | tr ' ' ',')
    number=$(scontrol show hostnames "$list" | sort -u | wc -l)
    have=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N | sort -u | wc -l)
    if [ $((have - number)) -lt $((fewest + spares)) ]; then
        say "not excluded:$bad- without $number of $have nodes the partition has too few for the job"
        return
    fi
    for try in 1 2 3; do
        if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$list"; then
            say "excluded from the next start:$bad(reasons: $named)"
            return
        fi
        sleep 1
    done
    say "cannot be excluded from the next start:$bad"
}
nodes=() place=()
"""
"""How the job learns which nodes to leave out; `fewest`, `spares` and `run` are values of the run."""

CHOOSE = r"""
# Of the nodes of the job $spares wait. The others run; when one of them is lost, a waiting one takes its place.
choose() { # set nodes to those that run; fail if fewer than $fewest are left
    local node state left=()
    while read -r node state; do
        case $state in down* | drain* | drng* | fail* | unk* | *'*') continue ;; esac
        case "$bad" in *" $node "*) continue ;; esac
        left+=("$node")
    done < <(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format="%N %t" | awk '!seen[$1]++')
    [ "${#left[@]}" -ge "$fewest" ] || return
    nodes=("${left[@]:0:SLURM_JOB_NUM_NODES - spares}")
    # --overlap: until Slurm has heard of a lost node again, it counts the cores of the step that was there as busy.
    place=(--overlap "--nodes=${#nodes[@]}" "--ntasks=$((${#nodes[@]} * tasks))")
    place+=("--nodelist=$(IFS=, && echo "${nodes[*]}")")
    watch "${left[-1]}"
}
watching=
watch() { # let another node requeue the job when this one is lost, which runs this script: Slurm itself does not
    if [ -n "$watching" ]; then kill "$watching"; fi
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --output=/dev/null bash -c '
        trap "" USR1
        while sleep 10; do
            case $(sinfo --noheader --nodes="$1" --format=%t) in down*) scontrol requeue "$2" && exit ;; esac
        done' watch "$SLURMD_NODENAME" "$SLURM_JOB_ID" 2>/dev/null &
    watching=$!
}
if ! choose; then say "fewer than $fewest nodes of the job can be used: submit it again"; exit 1; fi
say "runs on ${nodes[*]}; $spares of the job's nodes wait to take the place of a lost one"
"""
"""How a job with spares chooses the nodes that run."""

AGAIN = r"""
retry() { # let a waiting node take the place of one that is lost or named; fail where none is, or none waits
    # A start that was asked to stop, or has failed on nodes that are all well, is requeued as without spares.
    local was=${nodes[*]}
    if [ "$code" = {stopped} ] || [ -n "$asked" ] || ! choose || [ "${nodes[*]}" = "$was" ]; then return 1; fi
    before=$newest
    # Back to an earlier step only if the start before has not gone back yet; its folder need not be empty now.
    if ! goes_back; then resume=auto; fi
    say "exit code $code on $was; started again on ${nodes[*]}{onward}"
}
while retry; do attempt; done
"""
"""What a job with spares does after a failure, before it is requeued."""

RESUME = {
    "auto": "resume=auto\n",
    "never": "resume=auto # only the first start requires an empty folder\n"
    'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then resume=never; fi\n',
}

GO_BACK = """
# Go back to step {step}, unless an earlier start of this job did: then the newest checkpoint of before is gone, or new.
resume=auto
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && ! put "$state.began"; then say "$state.began cannot be written"; exit 1; fi
old=$run/checkpoints/sums/{newest}.json back={step}
if goes_back; then resume=$back; fi
"""
