"""The operators' kinds whose definitions no package publishes, with the fields used here.

They are those of the RabbitMQ cluster and messaging topology operators, of the Barman Cloud plugin, and the
metadata of KEDA's triggers. A misspelt field, which the API server would drop in silence, is refused.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec

_Number = Annotated[str, msgspec.Meta(pattern=r"\A[\d.]+\Z")]
_Compression = Literal["bzip2", "gzip", "lz4", "snappy", "xz", "zstd"]
_SPREAD = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"
_OF_BROKER = {"rabbitmqClusterReference.name": str}
_OPTIONAL = {"tags"}

# By kind, the type of each field: its path, in which `*` stands for any names.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "ObjectStore": {
        "retentionPolicy": Annotated[str, msgspec.Meta(pattern=r"\A[1-9]\d*[dwm]\Z")],
        "configuration.destinationPath": Annotated[str, msgspec.Meta(pattern=r"\A\w+://")],
        "configuration.s3Credentials.accessKeyId.name": str,
        "configuration.s3Credentials.accessKeyId.key": str,
        "configuration.s3Credentials.secretAccessKey.name": str,
        "configuration.s3Credentials.secretAccessKey.key": str,
        "configuration.wal.compression": _Compression,
        "configuration.data.compression": _Compression,
    },
    "RabbitmqCluster": {
        "replicas": Annotated[int, msgspec.Meta(ge=1)],
        "image": str,
        "persistence.storage": str,
        "tls.secretName": str,
        "resources.requests.*": str,
        "resources.limits.*": str,
        "rabbitmq.additionalConfig": str,
        f"{_SPREAD}.topologyKey": str,
        f"{_SPREAD}.labelSelector.matchLabels.*": str,
        "override.statefulSet.*": Any,
    },
    "Exchange": {
        **_OF_BROKER,
        "name": str,
        "type": Literal["direct", "fanout", "headers", "topic"],
        "durable": bool,
    },
    "Queue": {
        **_OF_BROKER,
        "name": str,
        "type": Literal["quorum", "classic", "stream"],
        "durable": bool,
        "arguments.*": str | int,
    },
    "Binding": {
        **_OF_BROKER,
        "source": str,
        "destination": str,
        "destinationType": Literal["queue", "exchange"],
        "routingKey": str,
    },
    "Policy": {
        **_OF_BROKER,
        "name": str,
        "pattern": str,
        "applyTo": Literal["queues", "classic_queues", "quorum_queues", "streams", "exchanges", "all"],
        "definition.*": str | int,
    },
    "User": {**_OF_BROKER, "tags": Literal["management", "policymaker", "monitoring", "administrator"]},
    "Permission": {
        **_OF_BROKER,
        "vhost": str,
        "userReference.name": str,
        "permissions.configure": str,
        "permissions.write": str,
        "permissions.read": str,
    },
    "postgresql trigger": {"query": str, "targetQueryValue": _Number},
    "rabbitmq trigger": {
        "protocol": Literal["http", "amqp", "auto"],
        "host": Annotated[str, msgspec.Meta(pattern=r"\Ahttp://[^@]+/\Z")],
        "queueName": str,
        "mode": Literal["QueueLength", "MessageRate"],
        "value": _Number,
    },
}


def check(kind: str, specification: Mapping[str, Any]) -> None:
    """Raise msgspec.ValidationError unless *specification* has the fields of its kind, and no other."""
    fields = FIELDS[kind]
    found = {path for path, _ in _values(specification, "")}
    named = {path: [field for field in fields if fnmatchcase(path, field)] for path in found}
    if unknown := {path for path, names in named.items() if not names}:
        raise msgspec.ValidationError(f"{kind} has no fields {unknown}.")
    if missing := fields.keys() - {field for names in named.values() for field in names} - _OPTIONAL:
        raise msgspec.ValidationError(f"{kind} needs {missing}.")
    for path, value in _values(specification, ""):
        msgspec.convert(value, fields[named[path][0]])


def _values(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each value with its path. The items of a list have the path of the list."""
    if isinstance(part, dict):
        for name, inner in part.items():
            yield from _values(inner, f"{path}.{name}".lstrip("."))
    elif isinstance(part, list):
        for inner in part:
            yield from _values(inner, path)
    else:
        yield path, part
