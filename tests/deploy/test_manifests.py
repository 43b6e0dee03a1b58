"""Every overlay renders to objects that are valid for Kubernetes and for the operators."""

import re
from typing import Any

import msgspec
import pytest
from yarl import URL

from service.telemetry import tracing
from tests.cluster.__main__ import callers_pod
from tests.deploy import manifests
from tests.deploy.manifests import PROCESSES, WITH_ENGINES, container_of, of_kind, pod_of, the_one, workloads
from tests.deploy.pages import INSTALLATION, OPERATING, REFERENCE

OF_LIBRARIES = {"PGSSLROOTCERT", "SSL_CERT_FILE"}
OF_THE_SECRET = {
    *(f"{role}_DATABASE_URL" for role in ("OWNER", "API", "WORKER", "OPERATOR")),
    *(f"{name.upper()}_AMQP_URL" for name in (*manifests.OF_RABBITMQ, "operator")),
    *("SMTP_URL", "REQUEST_SECRET_KEYS"),
}
PAGE = INSTALLATION.read_text()
each_overlay = pytest.mark.parametrize("overlay", manifests.OVERLAYS)


@each_overlay
def test_every_object_has_a_namespace_in_which_pods_meet_the_restricted_pod_security_standard(overlay):
    # Kustomize gives none to a Namespace or to any other object of the whole cluster.
    assert all("namespace" in manifest["metadata"] for manifest in manifests.rendered(overlay))
    assert "label namespace calculation-requests pod-security.kubernetes.io/enforce=restricted\n" in PAGE
    callers = {"metadata": {"name": "api"}, "spec": {"template": callers_pod(workloads(overlay)["api"], {})}}
    for workload in (*workloads(overlay).values(), callers):  # `make cluster-check` runs these callers.
        pod = pod_of(workload)
        expected = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        if workload["metadata"]["name"] in manifests.SECRETS:
            expected["readOnlyRootFilesystem"] = True
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for one in containers_of(pod):
            assert one["securityContext"] == one["securityContext"] | expected
        if workload is not callers:
            assert {"cpu", "memory"} <= container_of(workload)["resources"]["requests"].keys()


def containers_of(pod: manifests.Manifest) -> list[manifests.Manifest]:
    return [*pod["containers"], *pod.get("initContainers", [])]


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
        assert all(manifests.configuration(overlay)[variables[name]] == port for name, port in ports.items())
    (published,) = the_one(overlay, "Service", "api")["spec"]["ports"]
    assert published["targetPort"] == "http"
    if overlay in WITH_ENGINES:
        (scraped,) = the_one(overlay, "PodMonitor", "calculation-requests")["spec"]["podMetricsEndpoints"]
        assert (scraped["port"], scraped["path"]) == ("health", "/metrics")


@each_overlay
def test_no_pod_ends_before_its_successor_is_ready_or_in_disorder_and_evictions_take_one_at_a_time(overlay):
    giving_back = 5
    for name in PROCESSES:
        specification, pod = workloads(overlay)[name]["spec"], pod_of(workloads(overlay)[name])
        labels = specification["template"]["metadata"]["labels"]
        budget = the_one(overlay, "PodDisruptionBudget", name)["spec"]
        assert specification["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert (budget["selector"]["matchLabels"], budget["maxUnavailable"]) == (labels, 1)
        for spread in pod["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
            assert set(spread["matchLabelKeys"]) <= labels.keys() | {"pod-template-hash"}

        sleeps = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        shutdown = float(manifests.environment_of(overlay, name).get("SHUTDOWN_SECONDS") or 20)
        after = sleeps.get("seconds", 0) + giving_back + tracing.FLUSH_SECONDS if name == "api" else 0
        assert shutdown + after <= pod["terminationGracePeriodSeconds"]
        assert name == "api" or sleeps == {}, "only the API waits for load balancers that still send to it"
    service = the_one(overlay, "Service", "api")["spec"]
    assert service["selector"] == workloads(overlay)["api"]["spec"]["template"]["metadata"]["labels"]


@each_overlay
@pytest.mark.parametrize("process", manifests.SECRETS)
def test_process_gets_complete_settings_the_secrets_that_it_uses_and_nothing_else(overlay, process):
    given, secrets = manifests.environment_of(overlay, process), manifests.SECRETS[process]
    # Values from a Secret are unknown here, and those from other variables are not expanded.
    made_up = dict.fromkeys(("DATABASE_URL", "LISTEN_DATABASE_URL"), "postgresql://host/name")
    made_up |= {"AMQP_URL": "amqp://host/", "SMTP_URL": "smtp://host", "REQUEST_SECRET_KEYS": "key"}
    made_up |= {"BOUNCES_URL": "imaps://host"}
    values = {name: made_up.get(name, value) for name, value in given.items()}
    parts: set[str] = set()
    defined = set(manifests.configuration(overlay))
    for entry in container_of(workloads(overlay)[process])["env"]:
        used = set(re.findall(r"\$\((\w+)\)", entry.get("value") or ""))
        assert used <= defined, "Kubernetes does not expand `$(NAME)` if NAME is defined later"
        parts |= used
        defined.add(entry["name"])

    if process in PROCESSES:
        msgspec.convert(values, manifests.SETTINGS[process], strict=False)
    assert given.keys() & manifests.OF_ALL | {"LISTEN_DATABASE_URL"} == secrets | {"LISTEN_DATABASE_URL"}
    settings = [msgspec.structs.fields(each) for each in manifests.SETTINGS.values()]
    assert defined <= {field.encode_name for fields in settings for field in fields} | OF_LIBRARIES | parts


@each_overlay
def test_schema_is_applied_as_the_owner_before_every_start_of_an_api_and_by_nothing_else(overlay):
    schema = manifests.schema_container_of(overlay)
    owner, users = {"postgres-app", "OWNER_DATABASE_URL"}, {"api": "api", "operator": "operator"}

    assert schema["args"] == ["service", "schema", "apply"]
    if overlay == "production":  # without the pooler
        assert URL(schema["env"][-1]["value"]).host == "postgres-rw"
    assert words_of_secrets(schema) & owner
    assert of_kind(overlay, "Job") == {}, "it would end for good"
    assert all("initContainers" not in pod_of(workloads(overlay)[name]) for name in manifests.WORKERS)
    for process in manifests.SECRETS:
        user, used = users.get(process, "worker"), words_of_secrets(container_of(workloads(overlay)[process]))
        assert used & {f"postgres-{user}", f"{user.upper()}_DATABASE_URL"}
        assert not used & owner


def words_of_secrets(container: manifests.Manifest) -> set[str]:
    """Return the names and the keys of the Secrets that a container gets."""
    return {word for name, keys in secrets_in(container).items() for word in (name, *keys)}


def test_no_secret_is_committed_but_the_made_up_ones_and_without_operators_only_one_is_needed():
    versions = {manifest["apiVersion"] for manifest in manifests.rendered("external")}
    keys = OF_THE_SECRET | manifests.OF_BOUNCES

    assert of_kind("production", "Secret") == of_kind("external", "Secret") == {}
    assert the_one("dev", "Secret", "calculation-requests")["data"].keys() == OF_THE_SECRET
    assert secrets_in(manifests.rendered("external")) == {"calculation-requests": keys}
    assert versions == {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
    assert all(f"`{key}`" in PAGE for key in keys)


def test_secrets_that_production_needs_are_made_by_operators_or_documented():
    login = {"username", "password"}
    of_users = {f"{name}-user-credentials": login for name in of_kind("production", "User")}
    of_rabbitmq = the_one("production", "RabbitmqCluster", "rabbitmq")["spec"]["tls"]["secretName"]
    documented = {
        "calculation-requests": {"REQUEST_SECRET_KEYS", "SMTP_URL", *manifests.OF_BOUNCES},
        "postgres-backups": {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY"},
        **{f"postgres-{role}": login for role in ("api", "worker", "operator")},
        "postgres-scaling": {"connection"},
    }

    used = secrets_in(manifests.rendered("production"))

    assert used.pop("postgres-app") <= {*login, "fqdn-uri"}  # made with the Cluster
    assert used == {**documented, **of_users, of_rabbitmq: {"ca.crt"}}
    assert all(f"`{word}`" in PAGE for name, keys in documented.items() for word in (name, *keys))


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


OWN_AUTHORITY = [{"key": "ca.crt", "path": "ca.crt"}]  # of a Secret that may also contain a key


def source_of(path: str | None, container: manifests.Manifest, pod: manifests.Manifest) -> manifests.Manifest:
    """Return the volume in which a container finds the file at *path*."""
    folder, _, file = str(path).rpartition("/")
    assert file == "ca.crt"
    (name,) = {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == folder}
    return next(each for each in pod["volumes"] if each["name"] == name)


@pytest.mark.parametrize("process", PROCESSES)
def test_every_connection_to_postgres_is_verified_and_goes_to_what_the_operator_makes(process):
    pod = pod_of(workloads("production")[process])
    environment = manifests.environment_of("production", process)
    cluster, pooler = (of_kind("production", kind) for kind in ("Cluster", "Pooler"))
    names = cluster["postgres"]["spec"]["certificates"]["serverAltDNSNames"]
    database = cluster["postgres"]["spec"]["bootstrap"]["initdb"]["database"]
    # CloudNativePG's name of the authority's Secret.
    authority = {"secretName": "postgres-ca", "items": OWN_AUTHORITY}
    for container in containers_of(pod):
        urls = [URL(each.get("value") or "") for each in container["env"] if "DATABASE_URL" in each["name"]]
        assert urls
        for url in urls:
            assert url.query["sslmode"] == "verify-full"
            assert source_of(url.query["sslrootcert"], container, pod)["secret"] == authority
            assert url.host in {*names, "postgres-rw"}  # CloudNativePG's certificate names the latter anyway
    assert set(names) == pooler.keys()
    # Behind a pooler in transaction mode nothing is prepared.
    assert pooler[names[0]]["spec"]["pgbouncer"]["poolMode"] == "transaction"
    assert environment["DATABASE_STATEMENT_CACHE_SIZE"] == "0"
    assert f"@{names[0]}:5432/{database}?" in (environment["DATABASE_URL"] or "")
    assert process != "relay" or "LISTEN_DATABASE_URL" in environment


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_of_your_own_servers_trust_the_authorities_in_a_config_map_that_the_page_names(process):
    pod = pod_of(workloads("external")[process])
    for container in containers_of(pod):
        given = {each["name"]: each.get("value") for each in container["env"]}
        for variable in OF_LIBRARIES if container["name"] != "schema" else {"PGSSLROOTCERT"}:
            assert source_of(given[variable], container, pod)["configMap"] == {"name": "trust"}
    assert "create configmap trust --from-file=ca.crt" in PAGE


def test_rabbitmq_listens_only_with_tls_and_each_of_its_clients_verifies_its_certificate():
    broker = the_one("production", "RabbitmqCluster", "rabbitmq")["spec"]
    certificate = the_one("production", "Certificate", "rabbitmq")["spec"]
    names, authority = certificate["dnsNames"], {"name": certificate["secretName"], "key": "ca.crt"}
    issuer = the_one("production", "Issuer", certificate["issuerRef"]["name"])["spec"]["ca"]["secretName"]
    signing = [one["spec"] for one in of_kind("production", "Certificate").values() if "isCA" in one["spec"]]

    assert (broker["tls"]["disableNonTLSListeners"], broker["tls"]["secretName"]) == (True, authority["name"])
    assert "tcp" not in broker["rabbitmq"]["additionalConfig"]
    assert [one["secretName"] for one in signing] == [issuer]
    for process in manifests.OF_RABBITMQ:
        deployment = workloads("production")[process]
        url = URL(manifests.environment_of("production", process)["AMQP_URL"] or "")
        assert (url.scheme, url.host, url.port) == ("amqps", "rabbitmq", 5671)
        assert url.host in names
        secret = source_of(url.query["cafile"], container_of(deployment), pod_of(deployment))["secret"]
        assert secret == {"secretName": authority["name"], "items": OWN_AUTHORITY}

    given = the_one("production", "TriggerAuthentication", "rabbitmq")["spec"]
    triggers = [one["spec"]["triggers"][0] for one in of_kind("production", "ScaledObject").values()]
    hosts = [URL(one["metadata"]["host"]) for one in triggers if one["type"] == "rabbitmq"]
    (switch,) = given["configMapTargetRef"]
    enabled = the_one("production", "ConfigMap", switch["name"])["data"][switch["key"]]
    assert {(host.scheme, host.host in names, host.port) for host in hosts} == {("https", True, 15671)}
    assert (switch["parameter"], enabled) == ("tls", "enable")
    assert {"parameter": "ca", **authority} in given["secretTargetRef"]

    scraped = the_one("production", "PodMonitor", "calculation-requests-rabbitmq")["spec"]
    for endpoint in scraped["podMetricsEndpoints"]:
        assert (endpoint["scheme"], endpoint["port"]) == ("https", "prometheus-tls")
        assert endpoint["tlsConfig"]["ca"] == {"secret": authority}
        assert endpoint["tlsConfig"]["serverName"] in names


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
    pools = {name: manifests.environment_of("external", name)["DATABASE_POOL_SIZE"] for name in PROCESSES}
    counts = {name: least for name, (least, _) in manifests.replicas("external").items()}
    sleep, ending = api["lifecycle"]["preStop"]["sleep"]["seconds"], manifests.configuration("external")

    assert f"kills a process {manifests.grace_seconds():.0f} seconds after its pod is deleted" in pages
    assert f"`preStop` ({sleep}) and `SHUTDOWN_SECONDS` ({ending['SHUTDOWN_SECONDS']})" in pages
    assert f"(API {pools['api']}, relay {pools['relay']}, other roles {pools['calculations']})" in pages
    assert f"{counts['api']} of the API and {counts['relay']} of each role" in pages
    assert len({pools[name] for name in manifests.WORKERS if name != "relay"}) == 1
    assert len({counts[name] for name in manifests.WORKERS}) == 1
