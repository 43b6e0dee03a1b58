"""Every overlay renders to objects that are valid for Kubernetes and for the operators."""

import re
from typing import Any

import msgspec
import pytest
from yarl import URL

from service.telemetry import tracing
from tests.cluster.__main__ import callers_pod
from tests.deploy.manifests import (
    OF_ALL,
    OF_BOUNCES,
    OF_RABBITMQ,
    OVERLAYS,
    PROCESSES,
    SECRETS,
    SETTINGS,
    WITH_ENGINES,
    WORKERS,
    Manifest,
    configuration,
    container_of,
    environment_of,
    grace_seconds,
    of_kind,
    pod_of,
    rendered,
    replicas,
    schema_container_of,
    the_one,
    valid_kinds,
    workloads,
)
from tests.deploy.pages import INSTALLATION, OPERATING, REFERENCE, rows

OF_LIBRARIES = {"PGSSLROOTCERT", "SSL_CERT_FILE"}
OF_THE_SECRET = {
    *(f"{role}_DATABASE_URL" for role in ("OWNER", "API", "WORKER", "OPERATOR")),
    *(f"{name.upper()}_AMQP_URL" for name in (*OF_RABBITMQ, "operator")),
    *("SMTP_URL", "REQUEST_SECRET_KEYS"),
}
NAMES = {field.encode_name for each in SETTINGS.values() for field in msgspec.structs.fields(each)}
PAGE = INSTALLATION.read_text()

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_overlay_with_engines = pytest.mark.parametrize("overlay", WITH_ENGINES)


@each_overlay
def test_core_kinds_are_valid_in_strict_mode(overlay):
    assert {"Deployment", "Service", "PodDisruptionBudget", "ConfigMap"} <= valid_kinds(rendered(overlay))


@each_overlay
def test_every_object_is_in_the_namespace_so_that_its_tenant_may_apply_it_and_deleting_spares_it(overlay):
    """Kustomize gives no namespace to a Namespace or to any other object of the whole cluster."""
    assert all("namespace" in manifest["metadata"] for manifest in rendered(overlay))


@each_overlay
def test_pods_meet_the_restricted_pod_security_standard(overlay):
    assert "label namespace calculation-requests pod-security.kubernetes.io/enforce=restricted\n" in PAGE
    found = list(workloads(overlay).values())
    callers = {"metadata": {"name": "api"}, "spec": {"template": callers_pod(workloads(overlay)["api"], {})}}
    for workload in (*found, callers):  # `make cluster-check` runs these callers.
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
def test_every_pod_requests_what_it_needs_so_that_it_gets_processor_time_beside_others(overlay):
    for workload in workloads(overlay).values():
        assert min(requested(container_of(workload))) > 0


@each_overlay
def test_liveness_has_no_dependencies_and_every_probe_meets_a_port_that_no_service_publishes(overlay):
    variables = {"http": "PORT", "health": "HEALTH_PORT"}
    for name in PROCESSES:
        container = container_of(workloads(overlay)[name])
        for probe, path in {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}.items():
            assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "health"}
        liveness = container["livenessProbe"]
        judged = liveness["periodSeconds"] * liveness["failureThreshold"]
        assert judged + liveness["terminationGracePeriodSeconds"] <= 40, "a frozen process is replaced sooner"
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert ports.keys() == ({"http", "health"} if name == "api" else {"health"})
        assert all(configuration(overlay)[variables[name]] == port for name, port in ports.items())
    (published,) = the_one(overlay, "Service", "api")["spec"]["ports"]
    assert published["targetPort"] == "http"
    if overlay in WITH_ENGINES:
        (scraped,) = the_one(overlay, "PodMonitor", "calculation-requests")["spec"]["podMetricsEndpoints"]
        assert (scraped["port"], scraped["path"]) == ("health", "/metrics")


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
    given = environment_of(overlay, process)
    # Values from a Secret are unknown here, and those from other variables are not expanded.
    made_up = dict.fromkeys(("DATABASE_URL", "LISTEN_DATABASE_URL"), "postgresql://host/name")
    made_up |= {"AMQP_URL": "amqp://host/", "SMTP_URL": "smtp://host", "REQUEST_SECRET_KEYS": "key"}
    made_up |= {"BOUNCES_URL": "imaps://host"}

    msgspec.convert(
        {name: made_up.get(name, value) for name, value in given.items()}, SETTINGS[process], strict=False
    )


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
        assert defined <= NAMES | OF_LIBRARIES | parts


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

    assert secrets_in(rendered("external")) == {"calculation-requests": OF_THE_SECRET | OF_BOUNCES}
    assert versions == {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
    assert all(f"`{key}`" in PAGE for key in OF_THE_SECRET | OF_BOUNCES)


def test_secrets_that_production_needs_are_made_by_operators_or_documented():
    of_users = {
        f"{name}-user-credentials": {"username", "password"} for name in of_kind("production", "User")
    }
    of_rabbitmq = the_one("production", "RabbitmqCluster", "rabbitmq")["spec"]["tls"]["secretName"]
    documented = {
        "calculation-requests": {"REQUEST_SECRET_KEYS", "SMTP_URL", *OF_BOUNCES},
        "postgres-backups": {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY"},
        **{f"postgres-{role}": {"username", "password"} for role in ("api", "worker", "operator")},
        "postgres-scaling": {"connection"},
    }

    used = secrets_in(rendered("production"))
    of_postgres = used.pop("postgres-app")

    assert used == {**documented, **of_users, of_rabbitmq: {"ca.crt"}}
    assert of_postgres <= {"username", "password", "fqdn-uri"}
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


def secrets_in(manifest: Any) -> dict[str, set[str]]:
    """Return the keys of each Secret that a part of a manifest refers to."""
    used: dict[str, set[str]] = {}
    left: list[Any] = [manifest]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += [value for name, value in part.items() if name != "configMapTargetRef"]
            if {"name", "key"} <= part.keys():
                used.setdefault(part["name"], set()).add(part["key"])
        elif isinstance(part, list | tuple):
            left += part
    return used


def test_hosts_in_production_are_services_that_the_operators_make():
    (pooler,), (broker,) = (of_kind("production", kind) for kind in ("Pooler", "RabbitmqCluster"))
    database = the_one("production", "Cluster", "postgres")["spec"]["bootstrap"]["initdb"]["database"]

    for process in PROCESSES:
        given = environment_of("production", process)
        assert f"@{pooler}:5432/{database}?" in (given["DATABASE_URL"] or "")
        assert process not in OF_RABBITMQ or f"@{broker}:5671/" in (given["AMQP_URL"] or "")
    assert "LISTEN_DATABASE_URL" in environment_of("production", "relay")


OWN_AUTHORITY = [{"key": "ca.crt", "path": "ca.crt"}]  # of a Secret that may also contain a key


def source_of(path: str | None, container: Manifest, pod: Manifest) -> Manifest:
    """Return the volume in which a container finds the file at *path*."""
    folder, _, file = str(path).rpartition("/")
    assert file == "ca.crt"
    (name,) = {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == folder}
    return next(each for each in pod["volumes"] if each["name"] == name)


@pytest.mark.parametrize("process", PROCESSES)
def test_every_connection_to_postgres_is_verified(process):
    pod = pod_of(workloads("production")[process])
    cluster, pooler = (of_kind("production", kind) for kind in ("Cluster", "Pooler"))
    names = cluster["postgres"]["spec"]["certificates"]["serverAltDNSNames"]
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        urls = [URL(each.get("value") or "") for each in container["env"] if "DATABASE_URL" in each["name"]]
        assert urls
        for url in urls:
            assert url.query["sslmode"] == "verify-full"
            secret = source_of(url.query["sslrootcert"], container, pod)["secret"]
            assert secret == {
                "secretName": "postgres-ca",
                "items": OWN_AUTHORITY,
            }  # CloudNativePG's name
            assert url.host in {*names, "postgres-rw"}  # CloudNativePG's certificate names the latter anyway
    assert set(names) == set(pooler)


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_of_your_own_servers_trust_the_authorities_in_a_config_map_that_the_page_names(process):
    pod = pod_of(workloads("external")[process])
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        given = {each["name"]: each.get("value") for each in container["env"]}
        read = OF_LIBRARIES if container["name"] != "schema" else {"PGSSLROOTCERT"}
        for variable in read:
            assert source_of(given[variable], container, pod)["configMap"] == {"name": "trust"}
    assert "create configmap trust --from-file=ca.crt" in PAGE


@pytest.mark.parametrize("process", OF_RABBITMQ)
def test_worker_uses_tls_to_rabbitmq_and_trusts_the_authority_that_signed(process):
    deployment = workloads("production")[process]
    certificate = the_one("production", "Certificate", "rabbitmq")["spec"]
    authority = the_one("production", "Issuer", certificate["issuerRef"]["name"])["spec"]["ca"]["secretName"]
    signing = [one["spec"] for one in of_kind("production", "Certificate").values() if "isCA" in one["spec"]]
    broker = the_one("production", "RabbitmqCluster", "rabbitmq")
    url = URL(environment_of("production", process)["AMQP_URL"] or "")

    assert url.scheme == "amqps"
    assert url.host in certificate["dnsNames"]
    secret = source_of(url.query["cafile"], container_of(deployment), pod_of(deployment))["secret"]
    assert secret == {"secretName": certificate["secretName"], "items": OWN_AUTHORITY}
    assert broker["spec"]["tls"]["secretName"] == certificate["secretName"]
    assert [one["secretName"] for one in signing] == [authority]


def test_rabbitmq_listens_only_with_tls_and_keda_and_prometheus_verify_its_certificate():
    broker = the_one("production", "RabbitmqCluster", "rabbitmq")["spec"]
    names = the_one("production", "Certificate", "rabbitmq")["spec"]["dnsNames"]
    given = the_one("production", "TriggerAuthentication", "rabbitmq")["spec"]
    triggers = [one["spec"]["triggers"][0] for one in of_kind("production", "ScaledObject").values()]
    hosts = [URL(one["metadata"]["host"]) for one in triggers if one["type"] == "rabbitmq"]
    authority = {"name": broker["tls"]["secretName"], "key": "ca.crt"}
    scraped = the_one("production", "PodMonitor", "calculation-requests-rabbitmq")["spec"]

    assert broker["tls"]["disableNonTLSListeners"] is True
    assert "tcp" not in broker["rabbitmq"]["additionalConfig"]
    assert {(host.scheme, host.host in names, host.port) for host in hosts} == {("https", True, 15671)}
    (switch,) = given["configMapTargetRef"]
    assert switch["parameter"] == "tls"
    assert the_one("production", "ConfigMap", switch["name"])["data"][switch["key"]] == "enable"
    assert {"parameter": "ca", **authority} in given["secretTargetRef"]
    for endpoint in scraped["podMetricsEndpoints"]:
        assert (endpoint["scheme"], endpoint["port"]) == ("https", "prometheus-tls")
        assert endpoint["tlsConfig"]["ca"] == {"secret": authority}
        assert endpoint["tlsConfig"]["serverName"] in names


def test_nothing_is_prepared_behind_a_pooler_in_transaction_mode_and_the_schema_goes_around_it():
    pooler = the_one("production", "Pooler", "postgres-pooler")["spec"]["pgbouncer"]
    *_, database = schema_container_of("production")["env"]

    assert pooler["poolMode"] == "transaction"
    assert configuration("production")["DATABASE_STATEMENT_CACHE_SIZE"] == "0"
    assert (database["name"], URL(database["value"]).host) == ("DATABASE_URL", "postgres-rw")


def pods_in_a_rollout(overlay: str) -> dict[str, int]:
    """Return the most pods of each process: one more than it scales to."""
    return {name: most + 1 for name, (_, most) in replicas(overlay).items()}


def pooled(overlay: str) -> float:
    """Return the connections in the pools of all pods."""
    return sum(
        count * float(environment_of(overlay, name).get("DATABASE_POOL_SIZE") or 10)
        for name, count in pods_in_a_rollout(overlay).items()
    )


@each_overlay_with_engines
def test_connections_fit_when_everything_is_scaled_out(overlay):
    pooler = the_one(overlay, "Pooler", "postgres-pooler")["spec"]
    parameters = pooler["pgbouncer"]["parameters"]
    cluster = the_one(overlay, "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
    pods = pods_in_a_rollout(overlay)
    listening, schema = pods["relay"], pods["api"]  # each API applies the schema before it starts
    keda, operators, engine = len(of_kind(overlay, "ScaledObject")), 5, 15
    users = 3  # PgBouncer has a pool for each: the API's, the worker's, and in a rotation another one's.
    servers = pooler["instances"] * users * int(parameters["default_pool_size"])

    # One PgBouncer may have to carry all of them.
    assert pooled(overlay) <= int(parameters["max_client_conn"])
    assert servers + listening + keda + schema + operators + engine <= int(cluster["max_connections"])


def requested(container: Manifest) -> tuple[float, float]:
    """Return the CPUs and the GiB that a container, or an engine for each of its pods, requests."""
    units = {"m": 0.001, "Mi": 1 / 1024, "Gi": 1, "": 1}
    requests = container["resources"]["requests"]
    amounts = (re.fullmatch(r"(\d+)(\w*)", str(requests[name])) for name in ("cpu", "memory"))
    cpus, memory = (float(amount[1]) * units[amount[2]] for amount in amounts if amount)
    return cpus, memory


@pytest.mark.parametrize("overlay", ["external", *WITH_ENGINES])
def test_page_says_what_the_pods_request_and_how_many_connections_there_must_be(overlay):
    pods = [(container_of(workloads(overlay)[name]), least) for name, (least, _) in replicas(overlay).items()]
    for one in of_kind(overlay, "Cluster", "RabbitmqCluster", "Pooler").values():
        given = one["spec"]
        count = given.get("instances") or given["replicas"]
        pods.append((given["template"]["spec"]["containers"][0] if one["kind"] == "Pooler" else given, count))
    sums = [sum(count * requested(each)[part] for each, count in pods) for part in (0, 1)]
    surge = [
        sum(requested(container_of(workloads(overlay)[name]))[part] for name in PROCESSES) for part in (0, 1)
    ]
    job = requested(container_of(workloads(overlay)["operator"]))
    page = " ".join(PAGE.split())
    listed = {cells[0]: cells[1:] for cells in rows(INSTALLATION, "Scaling", "| CPUs")}

    assert listed[overlay][:2] == [f"{sums[0]:.2f}", f"{sums[1]:.1f} GiB"], "deploy/README.md, Scaling"
    assert f"requests {surge[0]:.1f} CPUs and {surge[1] * 1024:.0f} MiB more" in page
    assert f"`operate` requests {job[0]} CPUs and {job[1] * 1024:.0f} MiB" in page
    if overlay in WITH_ENGINES:
        cluster = the_one(overlay, "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
        assert listed[overlay][2] == cluster["max_connections"]
    else:
        listening, schema = (pods_in_a_rollout(overlay)[name] for name in ("relay", "api"))
        operators, superusers = 5, 3
        assert listed[overlay][2] == f"{pooled(overlay) + listening + schema + operators + superusers:.0f}"
        assert f"{listed[overlay][2]} connections" in PAGE


@each_overlay_with_engines
def test_autoscalers_target_deployments_that_exist_and_set_no_replicas(overlay):
    deployments = of_kind(overlay, "Deployment")
    scalers = of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject").values()
    fixed = {name for name, deployment in deployments.items() if "replicas" in deployment["spec"]}
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in scalers}

    assert len(scalers) == len(scaled)
    assert fixed == set(PROCESSES) - scaled, "replicas in deploy/k8s/base/workers.yaml, or an autoscaler"


@each_overlay
def test_schema_is_applied_before_every_start_of_an_api_and_by_nothing_that_ends_for_good(overlay):
    assert schema_container_of(overlay)["args"] == ["service", "schema", "apply"]
    assert of_kind(overlay, "Job") == {}
    assert all("initContainers" not in pod_of(workloads(overlay)[name]) for name in WORKERS)


def test_engines_have_exact_versions():
    engines = [each["spec"] for each in of_kind("production", "Cluster", "RabbitmqCluster").values()]
    images = [each.get("imageName") or each["image"] for each in engines]
    images += [container_of(workloads("dev")[name])["image"] for name in ("postgres", "rabbitmq")]

    assert len(images) == 4
    assert all(re.search(r":\d+\.\d+", image) for image in images)
    assert all(re.search(r":4\.\d+\.\d+-", image) for image in images if "rabbitmq" in image)


def test_pages_name_the_grace_period_the_replicas_and_the_pools_of_the_manifests():
    pages = " ".join("".join(page.read_text() for page in (INSTALLATION, OPERATING, REFERENCE)).split())
    api = container_of(workloads("external")["api"])
    pools = {name: environment_of("external", name)["DATABASE_POOL_SIZE"] for name in PROCESSES}
    counts = {name: least for name, (least, _) in replicas("external").items()}
    sleep, ending = api["lifecycle"]["preStop"]["sleep"]["seconds"], configuration("external")

    assert f"kills a process {grace_seconds():.0f} seconds after its pod is deleted" in pages
    assert f"`preStop` ({sleep}) and `SHUTDOWN_SECONDS` ({ending['SHUTDOWN_SECONDS']})" in pages
    assert f"(API {pools['api']}, relay {pools['relay']}, other roles {pools['calculations']})" in pages
    assert f"{counts['api']} of the API and {counts['relay']} of each role" in pages
    for of_roles in (
        {pools[name] for name in WORKERS if name != "relay"},
        {counts[name] for name in WORKERS},
    ):
        assert len(of_roles) == 1
