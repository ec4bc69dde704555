"""The Helm chart and the Compose file: validated against schemas and against our own options.

The chart takes values by their names and nothing else of Helm's language, so that it can be
rendered here without Helm; where Helm is, it lints and renders it too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from deepinfer_engine.cli.main import app

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "deepinfer"
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
HELM = shutil.which("helm")
KUBERNETES = "1.31"
EXPRESSION = re.compile(r"\{\{(.*?)\}\}")
NAME = re.compile(r" \.(Values|Release|Chart)((?:\.\w+)+) ")


def rendered(text: str) -> list[dict[str, Any]]:
    """Documents of a template, for a release called `mine`."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    known = {"Values": values, "Release": {"Name": "mine"}, "Chart": {}}

    def value(match: re.Match[str]) -> str:
        name = NAME.fullmatch(match[1])
        assert name is not None, f"{match[0]} is more than a value's name"
        found: Any = known[name[1]]
        for part in name[2].strip(".").split("."):
            found = found[part]
        # As Helm writes it: a quoted number in values is a plain one in the template.
        return str(found)

    return list(yaml.safe_load_all(EXPRESSION.sub(value, text)))


DOCUMENTS = [
    (path.stem, document)
    for path in TEMPLATES
    for document in rendered(path.read_text(encoding="utf-8"))
]


def options(role: str) -> set[str]:
    """The options of one of our commands."""
    command = typer.main.get_command(app).commands[role]
    return {name for parameter in command.params for name in parameter.opts}


def check_arguments(arguments: list[str]) -> None:
    role, *rest = arguments
    for argument in rest:
        assert argument.partition("=")[0] in options(role), f"{role} has no {argument}"


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_what_the_chart_makes_fits_the_schemas_of_kubernetes(name, document):
    check = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    check.validate(document, KUBERNETES, strict=True)


def test_containers_have_options_that_there_are_and_probes_and_no_rights():
    pods = [doc["spec"]["template"]["spec"] for _, doc in DOCUMENTS if doc["kind"] == "Deployment"]
    assert len(pods) == 4
    for pod in pods:
        (container,) = pod["containers"]
        check_arguments(container["args"])
        assert container["readinessProbe"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]
        # Its drain ends before it is killed.
        drain = next(a for a in container["args"] if a.startswith("--drain-timeout-s="))
        assert pod["terminationGracePeriodSeconds"] > int(drain.partition("=")[2])
        key = next(e for e in container["env"] if e["name"] == "DEEPINFER_CLUSTER_KEY")
        assert key["valueFrom"]["secretKeyRef"] == {"name": "deepinfer-keys", "key": "cluster"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_names_and_labels_of_the_chart_meet():
    by_kind = {(doc["kind"], doc["metadata"]["name"]): doc for _, doc in DOCUMENTS}
    service = by_kind["Service", "mine-router"]
    labels = by_kind["Deployment", "mine-router"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    port = service["spec"]["ports"][0]["port"]
    for role in ("prefill", "decode", "encode"):
        pod = by_kind["Deployment", f"mine-{role}"]["spec"]["template"]["spec"]
        assert f"--register-at=http://mine-router:{port}" in pod["containers"][0]["args"]
        claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "kv"]
        assert len(claims) == (role != "encode")  # it has no cache
        for claim in claims:
            assert ("PersistentVolumeClaim", claim["claimName"]) in by_kind


def test_helm_lints_and_renders_the_chart_as_we_do():
    if HELM is None:
        pytest.skip("no helm on this machine: the chart is rendered by this test alone")
    subprocess.run([HELM, "lint", "--strict", str(CHART)], check=True)
    done = subprocess.run(
        [HELM, "template", "mine", str(CHART)], check=True, capture_output=True, text=True
    )
    theirs = [doc for doc in yaml.safe_load_all(done.stdout) if doc]

    def named(docs):
        return sorted(docs, key=lambda doc: (doc["kind"], doc["metadata"]["name"]))

    assert named(theirs) == named([doc for _, doc in DOCUMENTS])


def test_the_compose_file_names_options_that_there_are():
    text = (DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    roles = [service["command"][0] for service in services.values()]
    assert sorted(roles) == ["decode", "decode", "encode", "prefill", "prefill", "router"]
    for name, service in services.items():
        check_arguments(service["command"])
        for argument in service["command"]:
            if argument.startswith("--advertise="):
                assert argument == f"--advertise={name}:{argument.rpartition(':')[2]}"
        assert service["environment"]["DEEPINFER_CLUSTER_KEY"].startswith("${")
