"""Postgres recovers from its backups as the page says, and never archives over them."""

from tests.deploy.manifests import OURS, Manifest, rendered_upon_production, the_one
from tests.deploy.pages import OPERATING, code_blocks

# What the page adds to an overlay, and its patch with the archives of a second restore.
A_ROLE, A_RESTORE = code_blocks(OPERATING, "Backup and restore", "yaml")
A_SECOND_RESTORE = A_RESTORE.replace("value: postgres-2}", "value: postgres-3}")
A_SECOND_RESTORE = A_SECOND_RESTORE.replace("value: postgres}", "value: postgres-2}")


def before() -> Manifest:
    """Return the Cluster's specification without a restore."""
    return the_one("production", "Cluster", "postgres")["spec"]


def archives(cluster: Manifest) -> tuple[str, str]:
    """Return the archive that a Cluster recovers from, and the one that it writes, in the same bucket."""
    recovery = cluster["spec"]["bootstrap"]["recovery"]
    (source,) = (one for one in cluster["spec"]["externalClusters"] if one["name"] == recovery["source"])
    (archiver,) = cluster["spec"]["plugins"]
    stores = [source["plugin"]["parameters"], archiver["parameters"]]
    assert archiver["isWALArchiver"] is True
    (usual,) = before()["plugins"]
    assert {source["plugin"]["name"], archiver["name"]} == {usual["name"]}
    assert {one["barmanObjectName"] for one in stores} == {usual["parameters"]["barmanObjectName"]}
    return stores[0]["serverName"], stores[1]["serverName"]


def test_database_is_recovered_up_to_the_moment_and_nothing_else_changes(tmp_path):
    cluster = rendered_upon_production(A_RESTORE, folder=tmp_path)["Cluster postgres"]
    usual, changed = before(), {"bootstrap", "externalClusters", "plugins"}

    assert cluster["spec"]["bootstrap"] == {
        "recovery": {
            **{name: usual["bootstrap"]["initdb"][name] for name in ("database", "owner")},
            "source": "archive",
            "recoveryTarget": {"targetTime": "2026-01-31T08:00:00Z"},
        }
    }
    assert cluster["spec"].keys() - changed == usual.keys() - changed
    assert all(cluster["spec"][name] == usual[name] for name in usual.keys() - changed)


def test_each_restore_reads_the_archive_of_the_last_cluster_and_writes_another(tmp_path):
    parts = {
        "whole": f"components: [{OURS}/components/restore]",
        "first": A_RESTORE,
        "second": A_SECOND_RESTORE,
    }
    restored = {
        name: rendered_upon_production(part, folder=tmp_path / name)["Cluster postgres"]
        for name, part in parts.items()
    }

    assert "serverName" not in before()["plugins"][0]["parameters"]  # It is the name of the Cluster.
    assert archives(restored["whole"]) == archives(restored["first"]) == ("postgres", "postgres-2")
    assert archives(restored["second"]) == ("postgres-2", "postgres-3")


def test_new_schedule_makes_a_base_backup_at_once():
    assert the_one("production", "ScheduledBackup", "postgres")["spec"]["immediate"] is True


def test_role_takes_the_place_of_the_keys_of_the_bucket(tmp_path):
    objects = rendered_upon_production(A_ROLE, folder=tmp_path)

    configuration = objects["ObjectStore postgres-backups"]["spec"]["configuration"]
    assert configuration["s3Credentials"] == {"inheritFromIAMRole": True}
    template = objects["Cluster postgres"]["spec"]["serviceAccountTemplate"]
    assert template["metadata"]["annotations"].keys() == {"eks.amazonaws.com/role-arn"}
