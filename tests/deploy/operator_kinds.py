"""The kinds that operators add to Kubernetes, with the fields used here.

Each struct holds fields that its custom resource definition names, and no more than we write: a misspelt one,
which the API server would drop in silence, is refused here. The schemas that are published as packages let
misspelt fields pass, and RabbitMQ's are not published at all. The definitions are those of CloudNativePG, its
Barman Cloud plugin, the RabbitMQ cluster and messaging topology operators, KEDA, the Prometheus operator,
cert-manager, and the Gateway API.
"""

from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Texts = dict[str, str]


class Part(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """Part of an object. Unknown fields are errors."""


class Reference(Part):
    """Another object of the namespace, by its name."""

    name: str


class SecretKey(Part):
    """One value of a Secret."""

    name: str
    key: str


class Storage(Part):
    """A volume claim."""

    size: str


class Synchronous(Part):
    """The number of standbys that a commit waits for."""

    method: Literal["any", "first"]
    number: Positive
    data_durability: Literal["required", "preferred"]
    failover_quorum: bool


class PostgresConfiguration(Part):
    """postgresql.conf."""

    synchronous: Synchronous
    parameters: Texts


class Initdb(Part):
    """The initial database."""

    database: str
    owner: str


class Bootstrap(Part):
    """How the first instance is made."""

    initdb: Initdb


class PostgresAffinity(Part):
    """Where instances may be scheduled."""

    enable_pod_anti_affinity: bool
    topology_key: str
    pod_anti_affinity_type: Literal["preferred", "required"]


class Spread(Part):
    """How pods are spread over hosts or zones."""

    topology_key: str
    max_skew: Positive
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: dict[Literal["matchLabels"], Texts]


class Plugin(Part):
    """A plugin of CloudNativePG."""

    name: str
    is_wal_archiver: bool = msgspec.field(name="isWALArchiver")
    parameters: Texts


class Cluster(Part):
    """A Postgres of several instances."""

    instances: Positive
    image_name: str
    bootstrap: Bootstrap
    postgresql: PostgresConfiguration
    primary_update_strategy: Literal["unsupervised", "supervised"]
    primary_update_method: Literal["switchover", "restart"]
    enable_pdb: bool = msgspec.field(name="enablePDB")
    affinity: PostgresAffinity
    topology_spread_constraints: list[Spread]
    storage: Storage
    wal_storage: Storage
    resources: dict[Literal["requests", "limits"], Texts]
    plugins: list[Plugin]


class PgBouncer(Part):
    """pgbouncer.ini; the values of its parameters are text."""

    pool_mode: Literal["session", "transaction"]
    parameters: Texts


class Pooler(Part):
    """PgBouncers in front of a Cluster."""

    cluster: Reference
    instances: Positive
    type: Literal["rw", "ro", "r"]
    pgbouncer: PgBouncer


class ScheduledBackup(Part):
    """Base backups at set times."""

    schedule: Annotated[str, msgspec.Meta(pattern=r"\A\S+( \S+){5}\Z")]  # seconds first
    immediate: bool
    backup_owner_reference: Literal["none", "self", "cluster"]
    cluster: Reference
    method: Literal["barmanObjectStore", "volumeSnapshot", "plugin"]
    plugin_configuration: Reference


class S3Credentials(Part):
    """Keys of an object store."""

    access_key_id: SecretKey
    secret_access_key: SecretKey


class Compression(Part):
    """How files are compressed."""

    compression: Literal["bzip2", "gzip", "lz4", "snappy", "xz", "zstd"]


class BarmanConfiguration(Part):
    """Where base backups and archived logs go."""

    destination_path: Annotated[str, msgspec.Meta(pattern=r"\A\w+://")]
    s3_credentials: S3Credentials
    wal: Compression
    data: Compression


class ObjectStore(Part):
    """A store for backups."""

    retention_policy: Annotated[str, msgspec.Meta(pattern=r"\A[1-9]\d*[dwm]\Z")]
    configuration: BarmanConfiguration


class Persistence(Part):
    """The volume of a RabbitMQ node."""

    storage: str


class RabbitmqConfiguration(Part):
    """rabbitmq.conf."""

    additional_config: str


class ApartTerm(Part):
    """Which pods must not share a host."""

    topology_key: str
    label_selector: dict[Literal["matchLabels"], Texts]


class PodAntiAffinity(Part):
    """Anti-affinity of pods."""

    required: list[ApartTerm] = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution")


class BrokerCertificate(Part):
    """The Secret with the certificate of RabbitMQ."""

    secret_name: str


class RabbitmqCluster(Part):
    """A RabbitMQ of several nodes."""

    replicas: Positive
    image: str
    persistence: Persistence
    tls: BrokerCertificate
    resources: dict[Literal["requests", "limits"], Texts]
    rabbitmq: RabbitmqConfiguration
    affinity: dict[Literal["podAntiAffinity"], PodAntiAffinity]
    override: dict[Literal["statefulSet", "service"], Any]


class OfBroker(Part):
    """The RabbitmqCluster that an object belongs to."""

    rabbitmq_cluster_reference: Reference


class Exchange(OfBroker):
    """An exchange."""

    name: str
    type: Literal["direct", "fanout", "headers", "topic"]
    durable: bool


class Queue(OfBroker):
    """A queue."""

    name: str
    type: Literal["quorum", "classic", "stream"]
    durable: bool
    arguments: dict[str, str | int]


class Binding(OfBroker):
    """What an exchange routes to a queue."""

    source: str
    destination: str
    destination_type: Literal["queue", "exchange"]
    routing_key: str


class Policy(OfBroker):
    """Settings of all queues that match a pattern."""

    name: str
    pattern: str
    apply_to: Literal["queues", "classic_queues", "quorum_queues", "streams", "exchanges", "all"]
    definition: dict[str, str | int]


class User(OfBroker):
    """A user of the broker."""

    tags: list[Literal["management", "policymaker", "monitoring", "administrator"]] = []


class Permissions(Part):
    """Regular expressions over the names of exchanges and queues."""

    configure: str
    write: str
    read: str


class Permission(OfBroker):
    """What a user may do in a virtual host."""

    vhost: str
    user_reference: Reference
    permissions: Permissions


class SecretTarget(Part):
    """A parameter of a trigger that comes from a Secret."""

    parameter: str
    name: str
    key: str


class TriggerAuthentication(Part):
    """The credentials of KEDA."""

    secret_target_ref: list[SecretTarget]


class PostgresQuestion(Part):
    """Metadata of KEDA's postgresql trigger; numbers are text."""

    query: str
    target_query_value: Annotated[str, msgspec.Meta(pattern=r"\A[\d.]+\Z")]


class QueueQuestion(Part):
    """Metadata of KEDA's rabbitmq trigger; numbers are text."""

    protocol: Literal["http", "amqp", "auto"]
    host: Annotated[str, msgspec.Meta(pattern=r"\Ahttp://[^@]+/\Z")]
    queue_name: str
    mode: Literal["QueueLength", "MessageRate"]
    value: Annotated[str, msgspec.Meta(pattern=r"\A[\d.]+\Z")]


class PostgresTrigger(Part, tag_field="type", tag="postgresql"):
    """Scales on the answer to a query."""

    authentication_ref: Reference
    metadata: PostgresQuestion


class QueueTrigger(Part, tag_field="type", tag="rabbitmq"):
    """Scales on the length of a queue."""

    authentication_ref: Reference
    metadata: QueueQuestion


class Fallback(Part):
    """The number of replicas while a trigger fails."""

    failure_threshold: Positive
    replicas: Positive


class ScaledObject(Part):
    """How many replicas a Deployment has."""

    scale_target_ref: Reference
    min_replica_count: Positive
    max_replica_count: Positive
    polling_interval: Positive
    fallback: Fallback
    triggers: list[PostgresTrigger | QueueTrigger]


class Requirement(Part):
    """One condition on labels."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = []


class Selector(Part):
    """Conditions on labels."""

    match_labels: Texts = {}
    match_expressions: list[Requirement] = []


class Endpoint(Part):
    """An endpoint with metrics."""

    port: str
    interval: Annotated[str, msgspec.Meta(pattern=r"\A\d+[sm]\Z")]
    path: str = "/metrics"
    params: dict[str, list[str]] = {}


class PodMonitor(Part):
    """Which pods' metrics Prometheus reads."""

    selector: Selector
    pod_metrics_endpoints: list[Endpoint]
    pod_target_labels: list[str] = []


class PrivateKey(Part):
    """The key of a certificate."""

    algorithm: Literal["RSA", "ECDSA", "Ed25519"]
    size: Positive


class Certificate(Part):
    """A certificate, kept in a Secret and renewed."""

    secret_name: str
    issuer_ref: Reference
    private_key: PrivateKey
    dns_names: list[str] = []
    is_ca: bool = msgspec.field(name="isCA", default=False)
    common_name: str = ""
    duration: Annotated[str, msgspec.Meta(pattern=r"\A\d+h\Z")] = "2160h"


class FromSecret(Part):
    """An authority, by the Secret with its certificate and key."""

    secret_name: str


class Issuer(Part):
    """What signs certificates."""

    self_signed: dict[str, str] | None = None
    ca: FromSecret | None = None


class ParentReference(Part):
    """The Gateway of a route."""

    name: str
    namespace: str


class PathMatch(Part):
    """A part of the paths of a host."""

    type: Literal["Exact", "PathPrefix", "RegularExpression"]
    value: str


class Backend(Part):
    """The Service that requests go to."""

    name: str
    port: Positive


class RouteRule(Part):
    """Which requests go where."""

    matches: list[dict[Literal["path"], PathMatch]]
    backend_refs: list[Backend]


class HTTPRoute(Part):
    """Which paths go to which Service."""

    parent_refs: list[ParentReference]
    hostnames: list[str]
    rules: list[RouteRule]


class AlertAnnotations(Part):
    """The texts of an alert."""

    summary: str
    description: str
    runbook_url: str = msgspec.field(name="runbook_url")


class Alert(Part):
    """One alerting rule."""

    alert: str
    expr: str
    labels: Texts
    annotations: AlertAnnotations
    duration: str | None = msgspec.field(name="for", default=None)


class AlertGroup(Part):
    """Alerts evaluated together."""

    name: str
    rules: list[Alert]


class PrometheusRule(Part):
    """The alerts."""

    groups: list[AlertGroup]


KINDS: dict[tuple[str, str], type[Part]] = {
    (version, kind.__name__): kind
    for version, kinds in {
        "postgresql.cnpg.io/v1": (Cluster, Pooler, ScheduledBackup),
        "barmancloud.cnpg.io/v1": (ObjectStore,),
        "rabbitmq.com/v1beta1": (RabbitmqCluster, Exchange, Queue, Binding, Policy, User, Permission),
        "keda.sh/v1alpha1": (TriggerAuthentication, ScaledObject),
        "monitoring.coreos.com/v1": (PodMonitor, PrometheusRule),
        "cert-manager.io/v1": (Issuer, Certificate),
        "gateway.networking.k8s.io/v1": (HTTPRoute,),
    }.items()
    for kind in kinds
}
