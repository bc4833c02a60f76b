"""deploy/: files for Docker, Prometheus, Grafana and Kubernetes, held by the tools that read them and
by the server that they start.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from reference.router.args import read_args as router_args
from reference.server.flags import parse, read_args
from reference.server.metrics import Metrics
from reference.server.process import TO_SAY_SO_S

yaml = pytest.importorskip("yaml", reason="NOT RUN: PyYAML is not installed")
DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# of Kubernetes itself; the others are read by kustomize and KEDA
OWN_SCHEMA = [path for path in MANIFESTS if path.stem not in ("kustomization", "scaledobject")]
IDS = dict(ids=lambda path: path.stem)


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pod() -> dict:
    return load(DEPLOY / "kubernetes/deployment.yaml")["spec"]["template"]["spec"]


def metrics_of_the_server() -> set[str]:
    """Every name that /metrics shows, without the ends that Prometheus adds."""
    stats = SimpleNamespace(num_running=0)
    counter = SimpleNamespace(observers=[])
    core = SimpleNamespace(max_model_len=2048)
    engine = SimpleNamespace(engine=core, counter=counter, stats=lambda: stats)
    families = Metrics(engine, "tiny").registry.collect()
    return {family.name for family in families} | {"up"}


@pytest.mark.parametrize("path", OWN_SCHEMA, **IDS)
def test_a_manifest_fits_the_schema_of_kubernetes(path):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="NOT RUN: kubernetes-validate is not installed"
    )
    validate.validate(load(path), "1.33", strict=True)


def test_a_manifest_with_a_typing_error_is_seen():
    validate = pytest.importorskip(
        "kubernetes_validate", reason="NOT RUN: kubernetes-validate is not installed"
    )
    manifest = load(DEPLOY / "kubernetes/deployment.yaml")
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest, "1.33", strict=True)


def test_all_manifests_are_applied_or_say_why_not():
    listed = set(load(DEPLOY / "kubernetes/kustomization.yaml")["resources"])
    apart = {"kustomization.yaml", "scaledobject.yaml", "secret.example.yaml"}
    assert listed | apart == {path.name for path in MANIFESTS} and not listed & apart


def replicas() -> dict:
    return load(DEPLOY / "compose.replicas.yaml")["services"]


def flags_of(service: dict, module: str) -> list[str]:
    """What a service of a compose file passes to a module, with no variable set."""
    command = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"]).split()
    return command[command.index(module) + 1 :]


@pytest.mark.parametrize("where", ["compose", "replica-1", "replica-2", "kubernetes"])
def test_the_server_takes_its_flags(where):
    """The very command line, read by the server's own reader."""
    if where == "kubernetes":
        flags = pod()["containers"][0]["args"]
    else:
        server = load(DEPLOY / "compose.yaml")["services"]["server"]
        flags = flags_of(replicas().get(where, server), "reference.server")
    args = read_args(parse(flags, "reference.server"))
    assert args.host == "0.0.0.0" and args.port == 8000


def test_nobody_is_killed_before_the_server_has_drained():
    container = pod()["containers"][0]
    drain_s = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(container["args"]))[1])
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause_s + drain_s
    server = load(DEPLOY / "compose.yaml")["services"]["server"]
    for service in (server, *replicas().values()):
        drain_s = int(re.search(r"--shutdown-timeout (\d+)", service["command"])[1])
        # the last errors have to reach their clients, too
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s + TO_SAY_SO_S


def test_the_router_finds_all_replicas_and_nobody_else_does():
    services = replicas()
    args = router_args(flags_of(services.pop("router"), "reference.router"))
    assert args.host == "0.0.0.0" and args.port == 8000
    assert sorted(args.replicas) == [f"http://{name}:8000" for name in sorted(services)]
    assert len(services) >= 2 and not any("ports" in service for service in services.values())
    for published in replicas()["router"]["ports"]:
        assert published.startswith("127.0.0.1:")


def test_ready_is_not_alive():
    container = pod()["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["startupProbe"]["httpGet"]["path"] == "/health"


def test_images_have_versions():
    images = [service["image"] for service in load(DEPLOY / "compose.yaml")["services"].values()]
    images += [service["image"] for service in replicas().values()]
    images += [container["image"] for container in pod()["containers"]]
    assert all(re.search(r":v?\d+\.\d+", image) for image in images)


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana/boards/serving.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for group in load(DEPLOY / "alerts.yaml")["groups"]:
        found += [rule["expr"] for rule in group["rules"]]
    triggers = load(DEPLOY / "kubernetes/scaledobject.yaml")["spec"]["triggers"]
    return found + [trigger["metadata"]["query"] for trigger in triggers]


@pytest.mark.parametrize("expression", expressions())
def test_boards_and_alerts_ask_for_what_the_server_counts(expression):
    asked = set(re.findall(r"vllm:\w+|http_requests\w*|\bup\b", expression))
    known = metrics_of_the_server()
    assert asked, "nothing of the server is asked for"
    for name in asked:
        plain = re.sub(r"_(total|bucket|count|sum)$", "", name)
        assert name in known or plain in known, f"{name} is not counted"


def test_prometheus_reads_its_files(tmp_path):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("NOT RUN: promtool is not installed")
    queries = "".join(
        f"- record: query:{at}\n  expr: {json.dumps(text.replace('$__rate_interval', '5m'))}\n"
        for at, text in enumerate(expressions())
    )
    rules = tmp_path / "queries.yaml"
    indented = queries.replace("\n", "\n  ")
    rules.write_text(f"groups:\n- name: board\n  rules:\n  {indented}")
    for kind, path in (("config", DEPLOY / "prometheus.yaml"), ("rules", rules)):
        done = subprocess.run([tool, "check", kind, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_fits_its_datasource():
    source = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    board = json.loads((DEPLOY / "grafana/boards/serving.json").read_text(encoding="utf-8"))
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
