"""A RabbitMQ cluster of three nodes, in containers."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex

import pytest

_IMAGE = os.environ.get("TEST_RABBITMQ_CLUSTER_IMAGE", "rabbitmq:4-management")
_SECONDS = 180


class Cluster:
    """Its nodes are numbered 1, 2 and 3. Clients connect to the first."""

    def __init__(self, name: str) -> None:
        self.nodes = [f"{name}-{number}" for number in (1, 2, 3)]

    def url(self, number: int = 1) -> str:
        """Return the AMQP_URL of a node that runs."""
        address = docker("port", self.nodes[number - 1], "5672/tcp").splitlines()[0]
        return f"amqp://guest:guest@{address}/"

    def kill(self, number: int) -> None:
        """Send SIGKILL to a node."""
        docker("kill", self.nodes[number - 1])

    def restart(self, number: int) -> None:
        """Start a killed node, and wait until it has joined the others."""
        docker("start", self.nodes[number - 1])
        self.wait(number)

    def wait(self, number: int) -> None:
        """Wait until a node runs. At first the container has no node that could be asked."""
        self.run(number, "sh", "-c", "until rabbitmqctl -q await_startup 2> /dev/null; do sleep 1; done")

    def run(self, number: int, *command: str) -> str:
        """Run a command on a node, and return what it prints."""
        return docker("exec", self.nodes[number - 1], *command)


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Start a cluster, or skip the test if no Docker engine has the image."""
    try:
        docker("image", "inspect", _IMAGE)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no Docker engine answers, or it has no image of RabbitMQ")
    name = f"rabbitmq-{token_hex(4)}"
    cluster = Cluster(name)
    docker("network", "create", name)
    try:
        for node in cluster.nodes:
            docker(
                *("run", "--detach", "--name", node, "--hostname", node, "--network", name),
                *("--publish", "127.0.0.1::5672", "--env", f"RABBITMQ_ERLANG_COOKIE={name}", _IMAGE),
            )
        for number in (1, 2, 3):
            cluster.wait(number)
            if number > 1:
                for step in (["stop_app"], ["join_cluster", f"rabbit@{cluster.nodes[0]}"], ["start_app"]):
                    cluster.run(number, "rabbitmqctl", "-q", *step)
        yield cluster
    finally:
        with suppress(subprocess.SubprocessError):
            docker("rm", "--force", "--volumes", *cluster.nodes)
            docker("network", "rm", name)


def docker(*arguments: str) -> str:
    """Run a command of the engine, and return what it prints. Raises CalledProcessError."""
    program = shutil.which("docker") or "docker"
    return subprocess.run(
        [program, *arguments], check=True, capture_output=True, text=True, timeout=_SECONDS
    ).stdout.strip()
