"""The engines of production keep what they confirmed when one of three hosts is lost."""

from tests.deploy.manifests import Manifest, the_one

HOST = "kubernetes.io/hostname"


def postgres() -> Manifest:
    specification: Manifest = the_one("production", "Cluster", "postgres")["spec"]
    return specification


def rabbitmq() -> Manifest:
    specification: Manifest = the_one("production", "RabbitmqCluster", "rabbitmq")["spec"]
    return specification


def rabbitmq_configuration() -> dict[str, str]:
    lines = rabbitmq()["rabbitmq"]["additionalConfig"].splitlines()
    return dict(line.split(" = ") for line in lines)


def test_only_a_standby_that_holds_every_answered_commit_is_promoted() -> None:
    """A commit waits for any one standby; without a check of all of them the other one could be promoted."""
    synchronous = postgres()["postgresql"]["synchronous"]

    assert synchronous["dataDurability"] == "required"
    assert synchronous["failoverQuorum"] is True


def test_queue_that_was_declared_while_nodes_were_away_grows_to_all_three() -> None:
    """`target-group-size` of a policy takes effect only while members are reconciled, by default never."""
    policy = the_one("production", "Policy", "quorum-queues")["spec"]

    enabled = rabbitmq_configuration()["quorum_queue.continuous_membership_reconciliation.enabled"]
    assert enabled == "true"
    assert policy["definition"]["target-group-size"] == rabbitmq()["replicas"]


def test_no_host_holds_two_of_an_engine() -> None:
    nodes = rabbitmq()["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert postgres()["affinity"]["podAntiAffinityType"] == "required"
    assert postgres()["affinity"]["topologyKey"] == HOST
    assert [term["topologyKey"] for term in nodes] == [HOST]
    assert nodes[0]["labelSelector"]["matchLabels"] == {"app.kubernetes.io/name": "rabbitmq"}


def test_engines_prefer_to_stand_in_different_zones() -> None:
    pod = rabbitmq()["override"]["statefulSet"]["spec"]["template"]["spec"]
    for spread in (postgres()["topologySpreadConstraints"], pod["topologySpreadConstraints"]):
        assert [(one["topologyKey"], one["whenUnsatisfiable"]) for one in spread] == [
            ("topology.kubernetes.io/zone", "ScheduleAnyway")
        ]
