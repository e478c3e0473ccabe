"""Which process of how many: what options and launchers say, and a sentence for each way in which they do not."""

import os
import socket
import stat

import pytest

from jaxdist import checkpoints, explain, launch
from jaxdist.cluster.address import check_own_name
from jaxdist.cluster.process_env import ProcessEnv, check_alone, find
from jaxdist.config import ClusterConfig, RequestError
from jaxdist.lab import __main__ as lab
from jaxdist.process.gpu_memory import gpu_share

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def options(coordinator="127.0.0.1:1234", processes=2, process_id=1) -> ClusterConfig:
    return ClusterConfig(coordinator=coordinator, processes=processes, process_id=process_id)


def test_nothing_said_is_one_process():
    assert find(ClusterConfig(), {}) == ProcessEnv()
    assert find(ClusterConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}).alone
    assert find(ClusterConfig(processes=1), STEP | TORCHRUN).alone


def test_options():
    place = find(options(), {})
    assert (place.process, place.processes, place.coordinator, place.gpus) == (1, 2, "127.0.0.1:1234", None)
    assert not place.leader


def test_variables_of_jax():
    place = find(
        ClusterConfig(), {"JAX_COORDINATOR_ADDRESS": "localhost:99", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}
    )
    assert (place.process, place.processes, place.coordinator) == (0, 4, "localhost:99")


def test_variables_of_torchrun():
    local = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    place = find(ClusterConfig(), TORCHRUN | local)
    assert (place.process, place.processes, place.coordinator, place.gpus) == (3, 8, "127.0.0.1:29500", (3,))
    taken = find(ClusterConfig(), TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert taken.coordinator == "127.0.0.1:29501"
    halves = find(
        ClusterConfig(),
        TORCHRUN | local | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"},
    )
    assert halves.gpus == (2, 3)
    own = find(ClusterConfig(), TORCHRUN | local | {"CUDA_VISIBLE_DEVICES": "3"})
    assert own.gpus is None


def test_variables_of_a_slurm_step(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames local[host,x]" ] && printf "localhost\\nlocalx\\n"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = find(ClusterConfig(), STEP | {"SLURM_STEP_NODELIST": "local[host,x]"})
    assert (place.process, place.processes, place.gpus) == (5, 8, (1,))
    host, port = place.coordinator.split(":")
    assert host == "localhost"
    together = find(ClusterConfig(), STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n7"})
    assert together.coordinator == f"127.0.0.1:{port}"
    other = find(ClusterConfig(), STEP | {"SLURM_STEP_ID": "3"}).coordinator
    assert other.split(":")[0] == "localhost"
    assert {port, other.split(":")[1]} < {str(n) for n in range(61440, 65536)}
    assert other.split(":")[1] != port
    assert find(ClusterConfig(), STEP | {"SLURM_GPUS_PER_TASK": "2"}).gpus is None
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "1,4(x2)", "SLURM_NODEID": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert find(ClusterConfig(), STEP | uneven).gpus == (2, 3)
    named = find(ClusterConfig(), STEP | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:5"})
    assert (named.coordinator, named.process) == ("127.0.0.1:5", 5)


def test_two_that_agree_are_one():
    both = {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "5"}
    assert find(options(processes=8, process_id=5), STEP | both).coordinator == "127.0.0.1:1234"


@pytest.mark.parametrize(
    ("asked", "environment", "fragments"),
    [
        (options(process_id=2), {}, ["process 2 of 2", "count from 0 to 1"]),
        (options(process_id=-1), {}, ["--cluster.process-id is missing"]),
        (options(processes=0), {}, ["--cluster.processes is missing"]),
        (options(processes=0, process_id=-1), {}, ["127.0.0.1:1234", "how many processes", "--cluster.processes"]),
        (options(coordinator=""), {}, ["no coordinator is named", "10.0.0.1:1234"]),
        (options(coordinator="127.0.0.1"), {}, ["'127.0.0.1' is not HOST:PORT"]),
        (options(coordinator="127.0.0.1:70000"), {}, ["not HOST:PORT"]),
        (options(coordinator="no-such-host.invalid:1"), {}, ["'no-such-host.invalid' cannot be found"]),
        (ClusterConfig(), {"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR, MASTER_PORT not", "--cluster.processes 1"]),
        (ClusterConfig(), TORCHRUN | {"RANK": "8"}, ["process 8 of 8"]),
        (ClusterConfig(), TORCHRUN | {"RANK": "first"}, ["RANK is 'first'", "whole number"]),
        (ClusterConfig(), {"JAX_PROCESS_ID": "1"}, ["JAX_PROCESS_ID set", "JAX_NUM_PROCESSES not"]),
        (ClusterConfig(), {"JAX_COORDINATOR_ADDRESS": "a:1"}, ["a:1", "how many processes"]),
        (ClusterConfig(), TORCHRUN | STEP, ["process 3 of 8", "5 of 8", "remove one of them"]),
        (options(), TORCHRUN, ["the --cluster options", "process 1 of 2", "3 of 8"]),
        (ClusterConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ["4 tasks", "srun", "--cluster.processes 1"]),
        (ClusterConfig(), STEP | {"SLURM_STEP_NODELIST": "n[1-2]"}, ["scontrol", "JAX_COORDINATOR_ADDRESS"]),
    ],
)  # fmt: skip
def test_a_sentence_for_each_mistake(asked, environment, fragments, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no scontrol
    with pytest.raises(RequestError) as error:
        find(asked, environment)
    assert len(error.value.problems) == 1
    for fragment in fragments:
        assert fragment in str(error.value)


MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5",
}  # fmt: skip
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MEET = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:99"}
ALL_OF_STEP = STEP | {"SLURM_NODEID": "0"}
INSTEAD = ("JAX_COORDINATOR_PORT", "SLURM_STEP_NUM_TASKS")
"""Variables that take the place of others, which are not read then."""
ALL_OF_TORCHRUN = TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
ALL_OF_JAX = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}
ODD = ("", "x", "-1", "1.5", "²", "٣", "0x10", "9" * 5000, " 3", "[", "a b", "3(x", "::1", "127.0.0.1:x", "a\n")

ENVIRONMENTS = [
    (name, {**environment, name: value})
    for environment in (ALL_OF_STEP, ALL_OF_TORCHRUN, ALL_OF_JAX, MPIRUN | MEET, HYDRA | MEET)
    for name in environment
    for value in ODD
] + [(name, ALL_OF_STEP | {name: value}) for name in INSTEAD for value in ODD]


def test_no_value_of_a_variable_ends_in_a_traceback(monkeypatch):
    """A sentence that names the variable, or its value; or the place, where the value is one that may stand there."""

    def found(host: str, port: int, **_: object):
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setenv("PATH", "")  # no scontrol
    for name, environment in ENVIRONMENTS:
        value = environment[name]
        try:
            place = find(ClusterConfig(), environment)
        except RequestError as error:
            told = str(error)
            assert name in told or value[:20] in told or "no coordinator is named" in told, (name, value, told)
            assert len(told) < 500
        else:
            free = name in ("TORCHELASTIC_USE_AGENT_STORE", "PMIX_RANK")  # anything but "True" is no; it is not read
            assert place.alone or free or value.isascii(), (name, value, place)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (ALL_OF_TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' in the environment; it must be a whole number"),
        (ALL_OF_TORCHRUN | {"WORLD_SIZE": "²"}, "WORLD_SIZE is '²' in the environment; it must be a whole number"),
        (ALL_OF_TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE and RANK say that there are 0 processes"),
        (ALL_OF_TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 in the environment; LOCAL_WORLD_SIZE 4 counts it"),
        (ALL_OF_TORCHRUN | {"MASTER_ADDR": "a\0b"}, "coordinator host 'a\0b' cannot be found"),
        (ALL_OF_TORCHRUN | {"MASTER_PORT": "٣"}, "MASTER_PORT is '٣' in the environment"),
        (STEP | {"SLURM_NTASKS": "abc"}, "SLURM_NTASKS is 'abc' in the environment"),
        (STEP | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID is 'x' in the environment"),
        (STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 in the environment, but SLURM_STEP_TASKS_PER_NODE '4(x2)'"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "SLURM_STEP_TASKS_PER_NODE is '4(x' in the environment"),
        (ALL_OF_JAX | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:٣"}, "coordinator '127.0.0.1:٣' is not HOST:PORT"),
    ],
)
def test_odd_values_of_launchers_are_named(environment, sentence):
    with pytest.raises(RequestError) as error:
        find(ClusterConfig(), environment)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("value", ["abc", "nan", "-1", "0", "inf"])
def test_a_share_of_memory_that_is_none(value, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", value)
    with pytest.raises(RequestError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION is '{value}' in the environment"):
        gpu_share()


def test_a_name_that_is_loopback_to_everybody_is_refused(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RequestError, match=r"'node7' is 127\.0\.1\.1 here, which other hosts cannot reach"):
        find(options(coordinator="node7:9"), {})
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(RequestError, match=r"own name .* stands for 127\.0\.1\.1"):
        check_own_name()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (STEP | {"SLURM_PROCID": "0"}, ["explain is a command of one process, but Slurm's variables say that 8"]),
        (TORCHRUN | {"RANK": "0"}, ["explain is a command of one process, but WORLD_SIZE and RANK say that 8"]),
        (STEP, []),
        (TORCHRUN, []),
    ],
    ids=["srun", "torchrun", "another of srun", "another of torchrun"],
)
def test_a_command_of_one_process_is_refused_to_several_and_the_first_says_so(environment, told):
    with pytest.raises(RequestError) as error:
        check_alone("explain", environment)
    assert [problem[: len(start)] for problem, start in zip(error.value.problems, told, strict=True)] == told


def test_a_command_of_one_process_runs_beside_a_launcher():
    """In the shell of a Slurm job, in a step of one task, and where variables of a launcher are left over."""
    shell = {name: value for name, value in STEP.items() if name in ("SLURM_JOB_ID", "SLURM_NTASKS")}
    for environment in ({}, shell, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "8"}):
        check_alone("explain", environment)


@pytest.mark.parametrize("command", [explain.main, checkpoints.main, lab.main, launch.main], ids=lambda f: f.__module__)
def test_these_are_commands_of_one_process(command, monkeypatch, tmp_path):
    for name, value in (TORCHRUN | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.toml").write_text("")
    argv = {checkpoints.main: [str(tmp_path)], lab.main: ["schedules"], launch.main: ["local"]}
    with pytest.raises(RequestError, match="is a command of one process"):
        command(argv.get(command, []))


INTERACTIVE = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "PMIX_RANK": "0"}


@pytest.mark.parametrize("environment", [MPIRUN, HYDRA], ids=["Open MPI", "PMI"])
def test_variables_of_mpi(environment):
    place = find(ClusterConfig(), environment | MEET)
    assert (place.process, place.processes, place.coordinator, place.gpus) == (5, 8, "127.0.0.1:99", (1,))
    assert find(ClusterConfig(coordinator="127.0.0.1:7"), environment).coordinator == "127.0.0.1:7"
    visible = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert find(ClusterConfig(), environment | MEET | visible).gpus == (2, 3)
    assert find(ClusterConfig(processes=1), environment).alone


def test_one_process_of_mpirun_is_alone():
    one = MPIRUN | {name: "1" for name in MPIRUN if name.endswith("SIZE")}
    one |= {name: "0" for name in MPIRUN if name.endswith("RANK")}
    assert find(ClusterConfig(), one).alone
    assert find(ClusterConfig(), HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"}).alone
    assert find(options(), one).processes == 2  # `mpirun -n 1` of a launcher that starts two
    assert find(ClusterConfig(), INTERACTIVE).alone


def test_mpirun_in_a_slurm_job_starts_a_helper_on_each_node():
    """The step of the helpers has a task on each node; Open MPI's processes inherit its variables."""
    helper = STEP | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert find(ClusterConfig(), helper | MPIRUN | MEET).processes == 8
    told_twice = STEP | {"SLURM_PROCID": "5", "PMI_SIZE": "8", "PMI_RANK": "5", "PMIX_RANK": "5"}  # srun --mpi=pmi2
    assert find(ClusterConfig(), told_twice).source == "PMI_SIZE and PMI_RANK"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (MPIRUN, "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK say that this is process 5 of 8, but no coordinator"),
        (HYDRA, "PMI_SIZE and PMI_RANK say that this is process 5 of 8, but no coordinator is named"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is '1' in the environment: a launcher has started this process, but no"),
        ({"PMIX_RANK": "0"} | MEET, "PMIX_RANK is '0' in the environment"),
        ({"PMI_RANK": "0"}, "PMI_RANK set in the environment, but PMI_SIZE not"),
        (MPIRUN | MEET | {"OMPI_COMM_WORLD_SIZE": "²"}, "OMPI_COMM_WORLD_SIZE is '²' in the environment"),
        (MPIRUN | MEET | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK is 4 in the environment; "),
        (MPIRUN | MEET | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK say that this"),
        (MPIRUN | TORCHRUN, "WORLD_SIZE and RANK say that this is process 3 of 8, but OMPI_COMM_WORLD_SIZE and OMPI"),
    ],
)
def test_what_mpi_does_not_say_is_told(environment, sentence):
    with pytest.raises(RequestError) as error:
        find(ClusterConfig(), environment)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (MPIRUN, [""]),
        (HYDRA | {"PMI_RANK": "0"}, ["plan is a command of one process, but PMI_SIZE and PMI_RANK say that 8"]),
        ({"PMIX_RANK": "1"}, ["plan is a command of one process, but PMIX_RANK is '1': several have been started"]),
    ],
)
def test_a_command_of_one_process_under_mpirun(environment, told):
    with pytest.raises(RequestError) as error:
        check_alone("plan", environment)
    assert [str(error.value)[: len(start)] for start in told] == told
    assert len(error.value.problems) == (told != [""])


def test_a_command_of_one_process_in_a_shell_that_speaks_pmix():
    for environment in (INTERACTIVE, {"PMIX_RANK": "0"}, HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        check_alone("plan", environment)
