"""The manifest of a run for Kubernetes: fields of the published API, and the run that its pods would start."""

import sys
from pathlib import Path

import pytest
import yaml

from jaxdist.cluster import kubernetes
from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, RequestError
from jaxdist.launch import main
from jaxdist.request import arguments

SCHEMA = {
    # Kubernetes 1.31 (kubernetes.io/docs/reference/kubernetes-api): core/v1 and batch/v1.
    "Service": {"apiVersion": {"v1"}, "kind": {"Service"}, "metadata": "Meta", "spec": "ServiceSpec"},
    "ServiceSpec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": "Labels"},
    "Meta": {"name": str},
    "Labels": {"batch.kubernetes.io/job-name": str},
    "Job": {"apiVersion": {"batch/v1"}, "kind": {"Job"}, "metadata": "Meta", "spec": "JobSpec"},
    "JobSpec": {
        **{"completionMode": {"Indexed"}, "completions": int, "parallelism": int, "backoffLimit": int},
        **{"podFailurePolicy": "PodFailurePolicy", "template": "PodTemplate"},
    },
    "PodFailurePolicy": {"rules": ["Rule"]},
    "Rule": {
        "action": {"FailJob", "FailIndex", "Ignore", "Count"},
        "onExitCodes?": "Codes",
        "onPodConditions?": ["On"],
    },
    "Codes": {"containerName?": str, "operator": {"In", "NotIn"}, "values": [int]},
    "On": {"type": str, "status": {"True", "False", "Unknown"}},
    "PodTemplate": {"spec": "PodSpec"},
    "PodSpec": {
        # A podFailurePolicy requires Never.
        **{"subdomain?": str, "restartPolicy": {"Never"}, "terminationGracePeriodSeconds": int},
        **{"initContainers": ["Container"], "containers": ["Container"], "volumes": ["Volume"]},
    },
    "Container": {
        **{"name": str, "image": str, "command": [str], "workingDir?": str, "env?": ["Env"]},
        **{"volumeMounts?": ["Mount"], "resources?": "Resources"},
    },
    "Env": {"name": str, "value?": str, "valueFrom?": "EnvSource"},
    "EnvSource": {"fieldRef": "FieldRef"},
    "FieldRef": {"fieldPath": str},
    "Mount": {"name": str, "mountPath": str},
    "Resources": {"limits": "Limits"},
    "Limits": {"nvidia.com/gpu": int},
    "Volume": {"name": str, "persistentVolumeClaim?": "Claim", "emptyDir?": "EmptyDir"},
    "Claim": {"claimName": str},
    "EmptyDir": {"medium": {"Memory"}},
    # JobSet's api/jobset/v1alpha2/jobset_types.go.
    "JobSet": {
        "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
        "kind": {"JobSet"},
        "metadata": "Meta",
        "spec": "JobSetSpec",
    },
    "JobSetSpec": {"network": "Network", "failurePolicy": "FailurePolicy", "replicatedJobs": ["ReplicatedJob"]},
    "Network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "FailurePolicy": {"maxRestarts": int, "rules": ["FailureRule"]},
    "FailureRule": {
        "name": str,
        "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"},
        "onJobFailureReasons": [str],
    },
    "ReplicatedJob": {"name": str, "replicas": int, "template": "JobTemplate"},
    "JobTemplate": {"spec": "JobSpec"},
}
"""The fields that are used, from the API. A word is a section, a set has all values; `?`: optional."""

NEEDED = ["--image=reg.io/jaxdist:1", "--claim=runs"]

GPUS = [*NEEDED, "gpt2_124m", "--nodes=2", "--gpus-per-node=4", "--mesh=8x1x1"]


def problems(value, shape, where="") -> list[str]:
    """What is not as the schema says."""
    if isinstance(shape, set):
        return [] if value in shape else [f"{where} is {value!r}"]
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where} is no list of something"]
        return [one for n, item in enumerate(value) for one in problems(item, shape[0], f"{where}[{n}]")]
    if not isinstance(shape, str):
        return [] if type(value) is shape else [f"{where} is {value!r}"]
    fields = {name.rstrip("?"): field for name, field in SCHEMA[shape].items()}
    needed = {name for name in SCHEMA[shape] if not name.endswith("?")}
    wrong = [f"{where}.{name} is unknown or missing" for name in (value.keys() - fields) | (needed - value.keys())]
    return wrong + [
        one for name in value.keys() & fields for one in problems(value[name], fields[name], f"{where}.{name}")
    ]


@pytest.fixture
def printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def manifest(*words):
        assert main(["kubernetes", *words]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return manifest


def job_of(documents) -> dict:
    """The spec of the Job, in either form."""
    last = documents[-1]
    return last["spec"] if last["kind"] == "Job" else last["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize("words", [GPUS, NEEDED], ids=["gpus", "cpus"])
def test_it_has_fields_of_the_api_only(printed, form, words):
    documents = printed(*words, f"--form={form}")
    assert [one["kind"] for one in documents] == (["JobSet"] if form == "jobset" else ["Service", "Job"])
    assert [problem for one in documents for problem in problems(one, one["kind"])] == []
    for rule in job_of(documents)["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})["values"]
        assert codes == sorted(set(codes) - {0})  # the API takes no others
        assert len(rule) == 2


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_the_pods_find_each_other(printed, monkeypatch, form):
    """Each has its place by its index; the coordinator is the name that Kubernetes gives the first."""
    documents = printed(*GPUS, f"--form={form}", "--job-name=mine")
    job = job_of(documents)
    pod = job["template"]["spec"]
    host = "mine-0" if form == "job" else "mine-train-0-0"
    service = documents[0]["metadata"]["name"] if form == "job" else documents[0]["spec"]["network"]["subdomain"]
    assert pod.get("subdomain", service) == service
    monkeypatch.setattr("socket.getaddrinfo", lambda host, port, **_: [(2, 1, 6, "", ("10.0.0.1", port))])
    for index in range(job["completions"]):
        env = {one["name"]: one.get("value", str(index)) for one in pod["containers"][0]["env"]}
        place = find(ClusterConfig(), env)
        assert (place.process, place.processes) == (index, 2)
        assert place.coordinator == f"{host}.{service}:61440"
    assert [one["valueFrom"] for one in pod["containers"][0]["env"] if "valueFrom" in one] == [
        {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    ]
    assert pod["initContainers"][0]["command"][-2:] == [f"{host}.{service}", "300"]


def test_the_pods_run_the_request(printed):
    """Kubernetes makes `$` of `$$`, and expands names otherwise."""
    words = ["--model.layers=2", "--sample.prompts=a $(HOME) ü: {b}, yes", "--sample.every=5", "--mesh=2x1x1"]
    pod = job_of(printed(*NEEDED, *words, "--run-dir=runs/of $HOME", "--checkpoint.grace-seconds=89.5"))["template"][
        "spec"
    ]
    command = [word.replace("$$", "$") for word in pod["containers"][0]["command"]]
    assert command[:3] == ["python", "-m", "jaxdist.train"]
    request = arguments(command[3:], "train", "")
    assert (
        request.config
        == arguments([*words, "--run-dir=runs/of $HOME", "--checkpoint.grace-seconds=89.5"], "t", "").config
    )
    assert all("$(" not in word.replace("$$", "") for word in pod["containers"][0]["command"])
    assert pod["containers"][0]["workingDir"] == pod["containers"][0]["volumeMounts"][0]["mountPath"] == str(Path.cwd())
    assert pod["terminationGracePeriodSeconds"] == 90 + kubernetes.MARGIN


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize(
    ("code", "follows"), [(1, "Count"), (2, "FailJob"), (75, "Ignore"), (85, "Ignore"), (137, "Count")]
)
def test_what_follows_an_exit_code(printed, form, code, follows):
    """As the Job controller decides: the first rule that matches, or else the failure counts."""
    documents = printed(*GPUS, f"--form={form}", "--restarts=4")
    job = job_of(documents)
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert all(rule["onExitCodes"]["containerName"] == "train" for rule in rules)
    actions = [rule["action"] for rule in rules if code in rule["onExitCodes"]["values"]]
    assert [*actions, "Count"][0] == follows
    if form == "job":
        assert job["backoffLimit"] == 4 * 2  # both pods fail each time
    else:
        policy = documents[0]["spec"]["failurePolicy"]
        assert (job["backoffLimit"], policy["maxRestarts"]) == (0, 4)
        assert policy["rules"][0]["action"] == "FailJobSet"
        assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]  # that of FailJob


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--claim=c"], "--image is missing"),
        (["--image=i"], "--claim is missing"),
        ([*NEEDED, "--image=A b"], "given twice|--image"),
        ([*NEEDED, "--", "mine.py"], "starts train only"),
        ([*NEEDED, "--resume=never"], "--resume never would hold for each start"),
        ([*NEEDED, "--nodes=2", "--gpus-per-node=4", "--mesh=4x1x1"], "mesh 4x1x1 does not fit 2 nodes with 4 GPUs"),
        ([*NEEDED, "--nodes=3", "--gpus-per-node=1", "--train.global-batch-size=8"], "would use 2 of 3 GPUs"),
        ([*NEEDED, "--run-dir=/elsewhere/run"], "/elsewhere/run is not in .*, where the pods mount"),
        ([*NEEDED, "--mount=there"], "--mount 'there' is not a whole path"),
        ([*NEEDED, "--job-name=My_Job"], "--job-name is 'My_Job'; it must be small letters"),
        ([*NEEDED, f"--job-name={'a' * 56}", "--form=jobset"], "at most 47 characters"),
        ([*NEEDED, "--form=pod"], "--form"),
        ([*NEEDED, "--sample.every=5", "--sample.prompts=a\nb"], r"'.*a\\nb' does not fit into a line"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(printed, words, sentence):
    with pytest.raises(RequestError, match=sentence) as error:
        printed(*words)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("folder", "name"),
    [("llama_1b", "llama-1b"), ("3B", "run-3b"), ("ü", "run"), ("a" * 70, "a" * 55), ("A.-b_", "a-b")],
)
def test_a_job_is_named_after_its_folder(folder, name):
    assert kubernetes.name_of("", Path("runs") / folder, "job", 10) == name


@pytest.mark.parametrize("missing", [3, 100])
def test_pods_wait_for_the_name_of_the_first(monkeypatch, missing):
    seconds, tries = iter(range(200)), []

    def resolve(host, port):
        tries.append(host)
        if len(tries) <= missing:
            raise OSError("unknown")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    monkeypatch.setattr(sys, "argv", ["-c", "a-0.a", "30"])
    if missing == 3:
        exec(kubernetes.AWAIT, {})
        assert tries == ["a-0.a"] * 4
        return
    with pytest.raises(SystemExit, match=r"after 30 s there is no a-0\.a: does the pod of process 0 run"):
        exec(kubernetes.AWAIT, {})
    assert len(tries) == 31
