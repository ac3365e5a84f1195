"""examples/kubernetes: manifests have the published fields, and their containers' processes work.

The models are those of the packages kubeflow-trainer-api, kubeflow-training and kubernetes.  A pod
is played by its process: command and environment are the manifest's, host names are the loopback.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launchers import untouched
from processes import free_port, wait_until

from ringreduce.core.processes import end

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "kubernetes"
LAUNCHED = str(Path(__file__).resolve().parents[1] / "launched.py")
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
# Module and start of the class's name, by apiVersion.
MODELS = {
    "v1": ("kubernetes.client.models", "V1"),
    "batch/v1": ("kubernetes.client.models", "V1"),
    "networking.k8s.io/v1": ("kubernetes.client.models", "V1"),
    "kubeflow.org/v1": ("kubeflow.training.models", "KubeflowOrgV1"),
    "jobset.x-k8s.io/v1alpha2": ("kubeflow_trainer_api.models", "JobsetV1alpha2"),
    "trainer.kubeflow.org/v1alpha1": ("kubeflow_trainer_api.models", "TrainerV1alpha1"),
}
LEAVES = {"object": object, "datetime": str, "str": str, "int": int, "bool": bool, "float": float}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def named(text: str) -> Any:
    """The type that an older generator of models writes as text, such as list[V1Container]."""
    if inner := re.fullmatch(r"list\[(.*)\]", text):
        return list[inner[1]]  # type: ignore[valid-type]
    if inner := re.fullmatch(r"dict\(str, (.*)\)", text):
        return dict[str, inner[1]]  # type: ignore[valid-type]
    if text in LEAVES:
        return LEAVES[text]
    modules = ("kubeflow.training.models", "kubernetes.client.models")
    found = [getattr(importlib.import_module(module), text, None) for module in modules]
    return next(kind for kind in found if kind)


def fields(model: Any) -> dict[str, tuple[Any, bool]]:
    """Types of a model's fields, and whether they must be there."""
    if hasattr(model, "openapi_types"):
        types = model.openapi_types
        return {model.attribute_map[key]: (types[key], False) for key in types}
    return {
        field.alias or name: (field.annotation, field.is_required())
        for name, field in model.model_fields.items()
    }


def faults(kind: Any, value: Any, path: str) -> Iterator[str]:
    """What the published model has in another way: unknown and missing fields, other types."""
    kind = named(kind) if isinstance(kind, str) else kind
    while typing.get_origin(kind) in (typing.Union, typing.Annotated):  # Optional, strict
        kind = typing.get_args(kind)[0]
    items = typing.get_args(kind)
    if typing.get_origin(kind) is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(items[0], item, f"{path}[{number}]")
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from faults(items[1], item, f"{path}.{key}")
    elif "actual_instance" in getattr(kind, "model_fields", ()):  # a quantity; a name or a number
        if not isinstance(value, (int, str)):
            yield f"{path} is {value!r}"
    elif hasattr(kind, "openapi_types") or hasattr(kind, "model_fields"):
        known = fields(kind)
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a {kind.__name__}"
            return
        yield from (f"{path}.{key} is unknown" for key in value.keys() - known.keys())
        needed = {key for key, (_, is_needed) in known.items() if is_needed}
        yield from (f"{path}.{key} is missing" for key in needed - value.keys())
        for key in value.keys() & known.keys():
            yield from faults(known[key][0], value[key], f"{path}.{key}")
    elif kind not in (object, Any):
        wanted = typing.get_origin(kind) or kind
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            yield f"{path} is {value!r}, not {wanted.__name__}"


def faults_of(document: dict[str, Any]) -> list[str]:
    module, start = MODELS[document["apiVersion"]]
    pytest.importorskip(module.split(".")[0])
    models = importlib.import_module(module)
    return list(faults(getattr(models, start + document["kind"]), document, document["kind"]))


@pytest.mark.parametrize("name", FILES)
def test_fields_are_those_of_the_published_models(name: str) -> None:
    for document in documents(name):
        assert faults_of(document) == []


def places(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a manifest."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            yield from places(item)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_field_is_seen_anywhere(name: str) -> None:
    for document in documents(name):
        for number, place in enumerate(places(document)):
            wrong = copy.deepcopy(document)
            list(places(wrong))[number]["retries"] = []  # not even a label
            assert [fault for fault in faults_of(wrong) if ".retries is " in fault], place
    wrong = copy.deepcopy(documents("jobset.yaml")[0])
    wrong["spec"]["failurePolicy"]["maxRestarts"] = "3"
    assert faults_of(wrong) == ["JobSet.spec.failurePolicy.maxRestarts is '3', not int"]


# ---- containers as processes


def pods(template: dict[str, Any], count: int) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of an indexed job's containers, with the index for its annotation."""
    (container,) = template["spec"]["containers"]
    found = []
    for index in range(count):
        env = {"JOB_COMPLETION_INDEX": str(index)}
        for entry in container.get("env", []):
            if "valueFrom" in entry:
                source = entry["valueFrom"]["fieldRef"]["fieldPath"]
                assert source == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            env[entry["name"]] = entry.get("value", str(index))
        found.append((container["command"], env))
    return found


class Container:
    """A container's process; output goes to a file."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        programs = {"python": [sys.executable]}
        programs["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
        self.log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*programs[command[0]], *command[1:]],
                env={**untouched(), **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=EXAMPLES,
                start_new_session=True,
            )


@contextmanager
def ended() -> Iterator[list[Container]]:
    """Containers that are put into the list are ended after the block."""
    containers: list[Container] = []
    try:
        yield containers
    finally:
        end([container.process for container in containers], grace=10.0)


def local(env: dict[str, str], port: int, *hosts: str) -> dict[str, str]:
    """The environment with the loopback for these hosts, and another port than 29500."""
    changed = {"29500": str(port)} | dict.fromkeys(hosts, "127.0.0.1")
    return {key: changed.get(value, value) for key, value in env.items()}


@pytest.mark.parametrize("name", FILES)
def test_the_network_policy_is_for_all_pods(name: str) -> None:
    (policy,) = documents("network-policy.yaml")
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    for document in documents(name):
        of_pods = [place for place in places(document) if "containers" in place.get("spec", {})]
        assert of_pods or document["kind"] not in ("Pod", "Job", "JobSet", "PyTorchJob")
        for pod in of_pods:
            assert wanted <= pod["metadata"]["labels"].items()


@pytest.mark.slow
def test_a_lost_pod_comes_back(tmp_path: Path) -> None:
    """survive.yaml: the others go on until its container, started again, has joined them."""
    victim = 0
    store, service, job = documents("survive.yaml")
    port, size = free_port(), job["spec"]["completions"]
    name = service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= store["metadata"]["labels"].items()
    template = job["spec"]["template"]
    assert template["spec"]["restartPolicy"] == "OnFailure"
    train = ["python", LAUNCHED, str(tmp_path), "--kill", str(victim), "--go-on"]
    with ended() as containers:
        (holder,) = store["spec"]["containers"]
        command = [str(port) if word == "29500" else word for word in holder["command"]]
        containers.append(Container(command, {}, tmp_path / "store.log"))
        ranks = []
        for rank, (command, env) in enumerate(pods(template, size)):
            assert command == ["python", "train.py"] and env["WORLD_SIZE"] == str(size)
            # Pods are hosts of their own: they share no memory.
            own = local(env, port, name) | {"RINGREDUCE_HOSTID": f"pod {rank} of {port}"}
            ranks.append((train, own, tmp_path / f"pod{rank}.log"))
        running = [Container(*rank) for rank in ranks]
        containers += running

        def logs() -> str:
            return "".join(container.log.read_text() for container in running)

        assert wait_until(lambda: running[victim].process.poll() is not None, 240), logs()
        assert running[victim].process.returncode == -signal.SIGKILL, logs()
        running[victim] = Container(*ranks[victim])
        containers.append(running[victim])
        assert wait_until(lambda: all(c.process.poll() is not None for c in running), 300), logs()
        assert [container.process.returncode for container in running] == [0] * size, logs()
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(size)]
    steps, weights = found[0]["steps"], found[0]["weights"]
    for rank, record in enumerate(found):
        assert record["began"] == (steps - 5 if rank == victim else 0)
        assert (record["steps"], record["weights"]) == (steps, weights)


@pytest.mark.slow
def test_the_pods_of_a_jobset_train(tmp_path: Path) -> None:
    """jobset.yaml: torchrun finds its options; a script that names no backend has ringreduce."""
    (jobset,) = documents("jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    host = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "t = torch.tensor([1.0])\n"
        "dist.all_reduce(t)\n"
        "made = dist.group.WORLD._get_backend(t.device).name()\n"
        'sys.stdout.write(f"{made} {t.item():g}\\n")\n'
        "dist.destroy_process_group()\n"
    )
    port = free_port()
    with ended() as containers:
        for index, (command, env) in enumerate(pods(spec["template"], spec["completions"])):
            assert command == ["torchrun", "train.py"] and env["PET_MASTER_ADDR"] == host
            own = local(env, port, host) | {"RINGREDUCE_HOSTID": f"pod {index} of {port}"}
            log = tmp_path / f"pod{index}.log"
            containers.append(Container(["torchrun", str(script)], own, log))
        for container in containers:
            assert container.process.wait(300) == 0, container.log.read_text()
    said = "".join(container.log.read_text() for container in containers)
    assert said.count("ringreduce 8\n") == 8, said
