"""deploy/: files for Docker, Prometheus, Grafana and Kubernetes, held by the tools that read them
and by the server that they start.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from reference.router import metrics as router_metrics
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


def manifest(name: str) -> dict:
    return load(DEPLOY / f"kubernetes/{name}.yaml")


def pod(name: str = "deployment") -> dict:
    return manifest(name)["spec"]["template"]["spec"]


def metrics_of_the_server() -> set[str]:
    """Every name that /metrics shows, without the ends that Prometheus adds."""
    stats = SimpleNamespace(num_running=0, blocks_by_group={}, expert_imbalance=None)
    info = SimpleNamespace(max_model_len=2048)
    engine = SimpleNamespace(info=info, observers=[], stats=lambda: stats)
    families = Metrics(engine, "tiny").registry.collect()
    return {family.name for family in families} | {"up"}


def metrics_of_the_router() -> set[str]:
    """The same of the router's /metrics."""
    metrics = router_metrics.Metrics()
    metrics.watch(SimpleNamespace(all=[]))
    return {family.name for family in metrics.registry.collect()}


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
    """The servers and the router of compose.replicas.yaml."""
    services = load(DEPLOY / "compose.replicas.yaml")["services"]
    return {name: one for name, one in services.items() if "command" in one}


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


def test_no_server_is_killed_before_it_has_drained():
    for name in ("deployment", "router"):
        container = pod(name)["containers"][0]
        drain_s = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(container["args"]))[1])
        pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod(name)["terminationGracePeriodSeconds"] > pause_s + drain_s
    server = load(DEPLOY / "compose.yaml")["services"]["server"]
    for service in (server, *replicas().values()):
        drain_s = int(re.search(r"--shutdown-timeout (\d+)", service["command"])[1])
        # the last errors have to reach their clients, too
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s + TO_SAY_SO_S


def test_the_router_alone_finds_all_replicas():
    services = replicas()
    args = router_args(flags_of(services.pop("router"), "reference.router"))
    assert args.host == "0.0.0.0" and args.port == 8000
    assert sorted(args.replicas) == [f"http://{name}:8000" for name in sorted(services)]
    assert len(services) >= 2 and not any("ports" in service for service in services.values())
    for published in replicas()["router"]["ports"]:
        assert published.startswith("127.0.0.1:")


def test_kubernetes_leads_clients_to_the_router_and_the_router_to_every_server():
    """The name of the headless service, its port and its pods; and nothing else reaches them."""
    args = router_args(pod("router")["containers"][0]["args"])
    headless, service = manifest("replicas"), manifest("service")
    name, (port,) = headless["metadata"]["name"], headless["spec"]["ports"]
    assert args.replicas == [f"dns://{name}:{port['port']}"] and args.host == "0.0.0.0"
    # a headless service maps no ports: the name is that of the pods themselves
    (listens,) = pod()["containers"][0]["ports"]
    assert headless["spec"]["clusterIP"] == "None" and port["port"] == listens["containerPort"]
    labels = manifest("deployment")["spec"]["template"]["metadata"]["labels"]
    of_router = manifest("router")["spec"]["template"]["metadata"]["labels"]
    assert headless["spec"]["selector"] == labels != of_router == service["spec"]["selector"]
    policy = manifest("networkpolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == of_router
    for budget, pods in (("pdb", labels), ("router-pdb", of_router)):
        assert manifest(budget)["spec"]["selector"]["matchLabels"] == pods


@pytest.mark.parametrize("name", ["deployment", "router"])
def test_ready_is_not_alive(name):
    container = pod(name)["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["startupProbe"]["httpGet"]["path"] == "/health"


def targets_of(file: str) -> dict[str, list[str]]:
    """{job: whom Prometheus asks}."""
    jobs = load(DEPLOY / file)["scrape_configs"]
    return {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}


def test_prometheus_asks_every_process():
    """Each server and the router, by the names and ports of their compose file."""
    names = {name for name in replicas() if name != "router"}
    assert targets_of("prometheus.yaml") == {"ladder": ["server:8000"]}
    found = targets_of("prometheus.replicas.yaml")
    assert set(found["ladder"]) == {f"{name}:8000" for name in names}
    assert found["router"] == ["router:8000"] and set(found) == {"ladder", "router"}
    for file, config in (("compose", "prometheus"), ("compose.replicas", "prometheus.replicas")):
        service = load(DEPLOY / f"{file}.yaml")["services"]["prometheus"]
        assert service["volumes"][0].startswith(f"./{config}.yaml:")
        jobs = {one for one in targets_of(f"{config}.yaml")}
        rules = (DEPLOY / "alerts.yaml").read_text(encoding="utf-8")
        assert all(f'up{{job="{job}"}}' in rules for job in jobs)


COMPOSED = ["compose.yaml", "compose.replicas.yaml"]


@pytest.mark.parametrize("file", COMPOSED)
def test_docker_compose_reads_its_file(file):
    tool = shutil.which("docker")
    command = [tool or "docker", "compose"]
    if tool is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("NOT RUN: docker compose is not installed")
    done = subprocess.run([*command, "-f", DEPLOY / file, "config", "-q"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("file", COMPOSED)
def test_a_compose_file_holds_together(file):
    """What can be known without Docker: mounted files exist, services that are waited for are
    there, and only this machine reaches what is published.
    """
    services = load(DEPLOY / file)["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services) - {name}
        for volume in service.get("volumes", ()):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(set(published)) == len(published) == 3


def test_images_have_versions():
    images = [one["image"] for file in COMPOSED for one in load(DEPLOY / file)["services"].values()]
    images += [one["image"] for name in ("deployment", "router") for one in pod(name)["containers"]]
    assert all(re.search(r":v?\d+\.\d+", image) for image in images)


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana/boards/serving.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    for group in load(DEPLOY / "alerts.yaml")["groups"]:
        found += [rule["expr"] for rule in group["rules"]]
    triggers = load(DEPLOY / "kubernetes/scaledobject.yaml")["spec"]["triggers"]
    return found + [trigger["metadata"]["query"] for trigger in triggers]


@pytest.mark.parametrize("expression", expressions())
def test_boards_and_alerts_ask_for_what_the_server_counts(expression):
    asked = set(re.findall(r"vllm:\w+|http_requests\w*|router_\w+|\bup\b", expression))
    known = metrics_of_the_server() | metrics_of_the_router()
    assert asked, "nothing of the server or the router is asked for"
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
    configs = [("config", DEPLOY / f"prometheus{which}.yaml") for which in ("", ".replicas")]
    for kind, path in (*configs, ("rules", rules)):
        done = subprocess.run([tool, "check", kind, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


ALARMS = {
    "ServerDown": ('up{job="ladder"}', "1 1 0x30", "1x40"),
    "QueueGrows": ("vllm:num_requests_waiting", "11x40", "0 30 0x40"),
    "CacheIsFull": ("vllm:kv_cache_usage_perc", "0.99x40", "0.9x40"),
    "RouterDown": ('up{job="router"}', "0x40", "1x40"),
    "NobodyServes": ("router_unserved_total", "0+2x40", "5x40"),
    "AnswersBreak": ('router_requests_total{outcome="broken"}', "0+1x40", "3x40"),
}


@pytest.mark.parametrize("name", ALARMS)
def test_an_alert_fires_when_it_should_and_not_before(name, tmp_path):
    """Half an hour of a series, one sample a minute, by promtool's own clock."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("NOT RUN: promtool is not installed")
    series, bad, good = ALARMS[name]
    rules = [rule for group in load(DEPLOY / "alerts.yaml")["groups"] for rule in group["rules"]]
    (rule,) = [rule for rule in rules if rule["alert"] == name]
    of_series = dict(re.findall(r'(\w+)="(\w+)"', series))
    fired = {"exp_labels": rule["labels"] | of_series, "exp_annotations": rule["annotations"]}
    asked = {"eval_time": "30m", "alertname": name}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values}],
            "alert_rule_test": [asked | {"exp_alerts": alerts}],
        }
        for values, alerts in ((bad, [fired]), (good, []))
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": tests}))
    done = subprocess.run([tool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_fits_its_datasource():
    source = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    board = json.loads((DEPLOY / "grafana/boards/serving.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(places) == len(set(places)) and places == sorted(places, key=lambda at: at[::-1])
    assert f"a board of {len(panels)} panels" in (DEPLOY / "README.md").read_text(encoding="utf-8")
