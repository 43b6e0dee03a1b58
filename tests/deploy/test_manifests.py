"""Every overlay renders to objects that are valid for Kubernetes and for the operators."""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from yarl import URL

from service.settings import ServiceSettings, Settings
from service.telemetry import tracing
from tests.deploy.manifests import (
    K8S,
    OF_ALL,
    OVERLAYS,
    PROCESSES,
    SECRETS,
    WORKERS,
    Manifest,
    configuration,
    container_of,
    environment_of,
    of_kind,
    pod_of,
    render,
    rendered,
    replicas_when_scaled,
    schema_container_of,
    the_one,
    workloads,
)
from tests.deploy.pages import INSTALLATION
from worker.settings import EmailSettings, WorkerSettings

SYNC_WAVE = "argocd.argoproj.io/sync-wave"
OF_KUBERNETES = ("rbac.authorization.k8s.io/", "networking.k8s.io/")
OF_THE_SECRET = {
    *(f"{role}_DATABASE_URL" for role in ("OWNER", "API", "WORKER", "OPERATOR")),
    *(f"{role}_AMQP_URL" for role in ("RELAY", "NOTIFICATIONS", "CALCULATIONS", "OPERATOR")),
    *("SMTP_URL", "REQUEST_SECRET_KEYS"),
}
SETTINGS = {
    field.encode_name: field
    for settings in (ServiceSettings, EmailSettings)
    for field in msgspec.structs.fields(settings)
}
PAGE = INSTALLATION.read_text()

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def rendered_with(old: str, new: str, *, overlay: str, folder: Path) -> tuple[Manifest, ...]:
    """Return the objects of an overlay after a change of its kustomization, made in a copy in *folder*."""
    changed = shutil.copytree(K8S, folder / "k8s") / "overlays" / overlay
    kustomization = changed / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace(old, new))
    return render(changed)


@each_overlay
def test_core_kinds_are_valid_in_strict_mode(overlay):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is installed by `make deploy-check`"
    )
    checked = set()
    for manifest in rendered(overlay):
        version = manifest["apiVersion"]
        if "." not in version or version.startswith(OF_KUBERNETES):
            validator.validate(manifest, "1.33", strict=True)
            checked.add(manifest["kind"])

    assert {"Deployment", "Service", "PodDisruptionBudget", "ConfigMap", "Namespace"} <= checked


@each_overlay
def test_pods_meet_the_restricted_pod_security_standard(overlay):
    (namespace,) = of_kind(overlay, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(overlay).values():
        pod, container = pod_of(workload), container_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_ours = workload["metadata"]["name"] in SECRETS
        read_only = {"readOnlyRootFilesystem": True} if is_ours else {}
        for one in (container, *pod.get("initContainers", [])):
            expected = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, **read_only}
            assert one["securityContext"] == one["securityContext"] | expected


@each_overlay
def test_liveness_has_no_dependencies_and_every_probe_meets_the_port_of_its_process(overlay):
    for name in PROCESSES:
        container = container_of(workloads(overlay)[name])
        (port,) = container["ports"]
        for probe, path in {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}.items():
            assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
        variable = "PORT" if name == "api" else "HEALTH_PORT"
        assert configuration(overlay)[variable] == str(port["containerPort"])


@each_overlay
def test_grace_period_is_long_enough_for_an_orderly_end(overlay):
    giving_back = 5
    for name in PROCESSES:
        workload = workloads(overlay)[name]
        sleeps = container_of(workload).get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        shutdown = float(environment_of(overlay, name).get("SHUTDOWN_SECONDS") or 20)
        of_api = sleeps.get("seconds", 0) + shutdown + giving_back + tracing.FLUSH_SECONDS
        needed = of_api if name == "api" else shutdown
        assert needed <= pod_of(workload)["terminationGracePeriodSeconds"]
    assert sleeps == {}, "only the API waits for load balancers that still send to it"


@each_overlay
def test_no_pod_ends_before_its_successor_is_ready_and_evictions_take_one_at_a_time(overlay):
    for name in PROCESSES:
        specification = workloads(overlay)[name]["spec"]
        labels = specification["template"]["metadata"]["labels"]
        budget = the_one(overlay, "PodDisruptionBudget", name)["spec"]
        assert specification["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert budget["selector"]["matchLabels"] == labels
        assert budget["maxUnavailable"] == 1
        for spread in pod_of(workloads(overlay)[name])["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
            assert set(spread["matchLabelKeys"]) <= labels.keys() | {"pod-template-hash"}
    service = the_one(overlay, "Service", "api")["spec"]
    assert service["selector"] == workloads(overlay)["api"]["spec"]["template"]["metadata"]["labels"]


@each_overlay
@pytest.mark.parametrize("process", PROCESSES)
def test_every_setting_without_a_default_is_set_and_none_is_invalid(overlay, process):
    of_process: dict[str, type[Settings]] = {"api": ServiceSettings, "notifications": EmailSettings}
    settings = of_process.get(process, WorkerSettings)
    given = environment_of(overlay, process)
    # Values from a Secret are unknown here, and those from other variables are not expanded.
    made_up = dict.fromkeys(("DATABASE_URL", "LISTEN_DATABASE_URL"), "postgresql://host/name")
    made_up |= {"AMQP_URL": "amqp://host/", "SMTP_URL": "smtp://host", "REQUEST_SECRET_KEYS": "key"}

    msgspec.convert({name: made_up.get(name, value) for name, value in given.items()}, settings, strict=False)


def test_every_setting_stands_in_the_configuration_with_its_default_or_comes_from_a_secret():
    text = (K8S / "base" / "configuration.env").read_text()
    entries = dict(
        line.removeprefix("# ").split("=", 1)
        for line in text.splitlines()
        if line.removeprefix("# ").partition("=")[0].isupper()
    )
    elsewhere = {name for name in SETTINGS if f" {name}" in text.split("\n\n")[0].replace("\n#", "")}

    assert entries.keys() | elsewhere == SETTINGS.keys()
    for name, value in entries.items():
        if value and not SETTINGS[name].required:
            assert msgspec.convert(value, SETTINGS[name].type, strict=False) == SETTINGS[name].default


@each_overlay
def test_variables_are_settings_or_parts_of_one_that_follows(overlay):
    """Kubernetes does not expand `$(NAME)` if NAME is defined later."""
    for process in SECRETS:
        parts: set[str] = set()
        defined = set(configuration(overlay))
        for entry in container_of(workloads(overlay)[process])["env"]:
            used = set(re.findall(r"\$\((\w+)\)", entry.get("value") or ""))
            assert used <= defined
            parts |= used
            defined.add(entry["name"])
        assert defined <= SETTINGS.keys() | parts


@each_overlay
@pytest.mark.parametrize("process", SECRETS)
def test_process_gets_only_the_secrets_that_it_uses(overlay, process):
    given = environment_of(overlay, process)

    assert (given.keys() & OF_ALL) | {"LISTEN_DATABASE_URL"} == SECRETS[process] | {"LISTEN_DATABASE_URL"}


@each_overlay
def test_only_the_schema_is_applied_as_the_owner_of_the_tables(overlay):
    owner, users = {"postgres-app", "OWNER_DATABASE_URL"}, {"api": "api", "operator": "operator"}

    assert words_of_secrets(schema_container_of(overlay)) & owner
    for process in SECRETS:
        user = users.get(process, "worker")
        used = words_of_secrets(container_of(workloads(overlay)[process]))
        assert used & {f"postgres-{user}", f"{user.upper()}_DATABASE_URL"}
        assert not used & owner


def words_of_secrets(container: Manifest) -> set[str]:
    """Return the names and the keys of the Secrets that a container gets."""
    return {word for name, keys in secrets_in(container).items() for word in (name, *keys)}


def test_no_secret_is_committed_but_the_made_up_ones_of_development():
    assert of_kind("production", "Secret") == of_kind("external", "Secret") == {}
    assert the_one("dev", "Secret", "calculation-requests")["data"].keys() == OF_THE_SECRET


def test_cluster_without_operators_needs_only_one_secret():
    versions = {manifest["apiVersion"] for manifest in rendered("external")}

    assert secrets_used("external") == {"calculation-requests": OF_THE_SECRET}
    assert versions == {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
    assert all(f"`{key}`" in PAGE for key in OF_THE_SECRET)


def test_secrets_that_production_needs_are_made_by_operators_or_documented():
    of_users = {
        f"{name}-user-credentials": {"username", "password"} for name in of_kind("production", "User")
    }
    documented = {
        "calculation-requests": {"REQUEST_SECRET_KEYS", "SMTP_URL"},
        "postgres-backups": {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY"},
        **{f"postgres-{role}": {"username", "password"} for role in ("api", "worker", "operator")},
        "postgres-scaling": {"connection"},
    }

    used = secrets_used("production")
    of_postgres = used.pop("postgres-app")

    assert used == {**documented, **of_users}
    assert of_postgres <= {"username", "password", "uri", "fqdn-uri"}
    assert "postgres" in of_kind("production", "Cluster")
    for name, keys in documented.items():
        assert all(f"`{word}`" in PAGE for word in {name, *keys})


def test_roles_of_postgres_exist_before_the_schema_and_log_in_with_the_secrets_of_their_processes():
    cluster = the_one("production", "Cluster", "postgres")["spec"]
    made = {f"CREATE ROLE calculation_requests_{role}" for role in ("api", "worker", "operator", "scaling")}

    assert set(cluster["bootstrap"]["initdb"]["postInitSQL"]) == made
    assert {f"CREATE ROLE {role['name']}" for role in cluster["managed"]["roles"]} == made
    for role in cluster["managed"]["roles"]:
        assert role["passwordSecret"] == {"name": f"postgres-{role['name'].rpartition('_')[2]}"}


def secrets_used(overlay: str) -> dict[str, set[str]]:
    """Return the keys of each Secret that a manifest refers to."""
    return secrets_in([*rendered(overlay)])


def secrets_in(manifest: Any) -> dict[str, set[str]]:
    """Return the keys of each Secret that a part of a manifest refers to."""
    used: dict[str, set[str]] = {}
    left: list[Any] = [manifest]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
            if {"name", "key"} <= part.keys():
                used.setdefault(part["name"], set()).add(part["key"])
        elif isinstance(part, list):
            left += part
    return used


def test_hosts_in_production_are_services_that_the_operators_make():
    pooler = next(iter(of_kind("production", "Pooler")))
    broker = next(iter(of_kind("production", "RabbitmqCluster")))
    database = the_one("production", "Cluster", "postgres")["spec"]["bootstrap"]["initdb"]["database"]

    for process in PROCESSES:
        given = environment_of("production", process)
        assert f"@{pooler}:5432/{database}?" in (given["DATABASE_URL"] or "")
        assert process == "api" or f"@{broker}:5671/" in (given["AMQP_URL"] or "")
    assert "LISTEN_DATABASE_URL" in environment_of("production", "relay")


@pytest.mark.parametrize("process", WORKERS)
def test_worker_uses_tls_to_rabbitmq_and_trusts_the_authority_that_signed(process):
    deployment = workloads("production")[process]
    (mount,), (volume,) = container_of(deployment)["volumeMounts"], pod_of(deployment)["volumes"]
    certificate = the_one("production", "Certificate", "rabbitmq")["spec"]
    authority = the_one("production", "Issuer", certificate["issuerRef"]["name"])["spec"]["ca"]["secretName"]
    signing = [one["spec"] for one in of_kind("production", "Certificate").values() if "isCA" in one["spec"]]
    broker = the_one("production", "RabbitmqCluster", "rabbitmq")
    url = URL(environment_of("production", process)["AMQP_URL"] or "")

    assert url.scheme == "amqps"
    assert url.host in certificate["dnsNames"]
    assert url.query == {"cafile": f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"}
    assert volume["secret"]["secretName"] == certificate["secretName"] == broker["spec"]["tls"]["secretName"]
    assert [one["secretName"] for one in signing] == [authority]


def test_namespace_of_the_overlay_reaches_every_address_of_a_service(tmp_path):
    old, new = "\nnamespace: calculation-requests\n", "\nnamespace: elsewhere\n"
    moved = msgspec.json.encode(rendered_with(old, new, overlay="production", folder=tmp_path))

    addresses = re.findall(rb"\w+\.([\w-]+)\.svc\b", moved)

    assert addresses == [b"elsewhere"] * 4


def test_nothing_is_prepared_behind_a_pooler_in_transaction_mode_and_the_schema_goes_around_it():
    pooler = the_one("production", "Pooler", "postgres-pooler")["spec"]["pgbouncer"]
    (database,) = schema_container_of("production")["env"]

    assert pooler["poolMode"] == "transaction"
    assert configuration("production")["DATABASE_STATEMENT_CACHE_SIZE"] == "0"
    assert database["valueFrom"]["secretKeyRef"] == {"name": "postgres-app", "key": "uri"}


def connections_of(overlay: str, process: str) -> float:
    """Return the connections in the pool of a pod."""
    return float(environment_of(overlay, process).get("DATABASE_POOL_SIZE") or 10)


def test_connections_fit_when_everything_is_scaled_out():
    pooler = the_one("production", "Pooler", "postgres-pooler")["spec"]
    parameters = pooler["pgbouncer"]["parameters"]
    cluster = the_one("production", "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
    pods = {name: most + 1 for name, (_, most) in replicas_when_scaled().items()}  # one more in a rollout
    assert pods.keys() == set(PROCESSES)

    clients = sum(count * connections_of("production", name) for name, count in pods.items())
    listening, schema = pods["relay"], pods["api"]  # each API applies the schema before it starts
    keda, operators, engine = len(of_kind("production", "ScaledObject")), 5, 15
    users = 2  # PgBouncer has a pool for each: the API's and the worker's.
    servers = pooler["instances"] * users * int(parameters["default_pool_size"])

    # One PgBouncer may have to carry all of them.
    assert clients <= int(parameters["max_client_conn"])
    assert servers + listening + keda + schema + operators + engine <= int(cluster["max_connections"])


def test_page_says_how_many_connections_an_external_postgres_must_allow():
    deployments = of_kind("external", "Deployment")
    pods = {name: deployments[name]["spec"]["replicas"] + 1 for name in PROCESSES}

    pools = sum(count * connections_of("external", name) for name, count in pods.items())
    listening, schema, operators = pods["relay"], pods["api"], 5

    assert f"{pools + listening + schema + operators:.0f} connections" in PAGE


def test_autoscalers_target_deployments_that_exist_and_set_no_replicas():
    deployments = of_kind("production", "Deployment")
    scalers = of_kind("production", "HorizontalPodAutoscaler", "ScaledObject").values()

    assert {one["spec"]["scaleTargetRef"]["name"] for one in scalers} == deployments.keys() == set(PROCESSES)
    assert all("replicas" not in deployment["spec"] for deployment in deployments.values())


@pytest.mark.parametrize("overlay", ["external", "production"])
def test_ingress_exposes_only_the_api_of_callers(overlay):
    (rule,) = the_one(overlay, "Ingress", "api")["spec"]["rules"]

    assert {path["path"] for path in rule["http"]["paths"]} == {"/v1", "/schema"}


def test_gateway_may_take_the_place_of_the_ingress(tmp_path):
    objects = rendered_with("components/ingress", "components/gateway", overlay="external", folder=tmp_path)

    specifications = {one["kind"]: one["spec"] for one in objects if "spec" in one}

    assert "Ingress" not in specifications
    (rule,) = specifications["HTTPRoute"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/schema"]
    assert rule["backendRefs"] == [{"name": "api", "port": specifications["Service"]["ports"][0]["port"]}]


def test_metrics_are_read_at_ports_that_the_processes_have():
    monitor = the_one("production", "PodMonitor", "calculation-requests")["spec"]
    deployed = workloads("production")
    ports = {port["name"] for name in PROCESSES for port in container_of(deployed[name])["ports"]}

    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports


@each_overlay
def test_schema_is_applied_before_every_start_of_an_api_and_by_nothing_that_ends_for_good(overlay):
    assert schema_container_of(overlay)["args"] == ["service", "schema", "apply"]
    assert of_kind(overlay, "Job") == {}
    assert all("initContainers" not in pod_of(workloads(overlay)[name]) for name in WORKERS)


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_argo_cd_applies_the_engines_before_the_processes(overlay):
    engines = of_kind(overlay, "Cluster", "Pooler", "RabbitmqCluster", "StatefulSet").values()

    assert {one["metadata"]["annotations"][SYNC_WAVE] for one in engines} == {"-2"}
    assert all(SYNC_WAVE not in str(workloads(overlay)[name]["metadata"]) for name in PROCESSES)
