"""RabbitMQ as a child process: the installed `rabbitmq-server`, else Debian's, as a private node."""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages
from deploy.local.machine.folders import Place, secret_in, working_folder
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Program, running, wait_for
from deploy.local.servers.server import Server, trouble_of_rabbitmq

_START_SECONDS = 90.0
# This program runs as any user. The `rabbitmq-server` on Debian's PATH insists on the user rabbitmq.
_DEBIAN_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


@dataclass(frozen=True)
class Programs:
    """The broker, Erlang's name server, and the environment that both need."""

    server: Path
    epmd: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def rabbitmq_node(place: Place, *, further_settings: str = "") -> Iterator[Server]:
    """Run RabbitMQ on the loopback interface, with its data in the folder of *place*."""
    programs = find_programs(place)
    with working_folder(place, "rabbitmq") as folder:
        port = free_port()
        epmd_port = free_port()
        environment = {**_environment(folder, port=port, epmd_port=epmd_port), **programs.environment}
        with (folder / "rabbitmq.conf").open("a") as configuration:
            configuration.write(further_settings)
        name_server = Program(
            name="Erlang name server",
            command=[programs.epmd, "-address", "127.0.0.1", "-port", str(epmd_port)],
            environment=environment,
            folder=folder,
            log=place.log("epmd", folder),
        )
        broker = Program(
            name="RabbitMQ server",
            command=[programs.server],
            environment=environment,
            folder=folder,
            log=place.log("rabbitmq", folder),
            stop_signal=signal.SIGTERM if place.keep else signal.SIGKILL,
        )
        # Otherwise the node would start Erlang's name server itself, and leave it behind.
        with running(name_server) as epmd:
            wait_for(epmd, lambda: accepts(epmd_port), seconds=_START_SECONDS)
            with running(broker) as node:
                url = f"amqp://guest:{secret_in(folder / 'password')}@127.0.0.1:{port}/"
                wait_for(node, lambda: accepts(port) and not trouble_of_rabbitmq(url), seconds=_START_SECONDS)
                place.report(f"RabbitMQ runs on this machine, port {port}.")
                ours = environment.items() - os.environ.items()
                client = ("env", *map("=".join, ours), str(programs.server.parent / "rabbitmqctl"))
                yield Server(url, node.trouble, node.last_lines, node, client)


def find_programs(place: Place) -> Programs:
    """Return the installed programs, else those of Debian's package, unpacked. Raises LocalStackError."""
    if installed := _installed_programs():
        return installed
    try:
        root = packages.unpacked("rabbitmq-server", report=place.report)
    except LocalStackError as reason:
        raise LocalStackError(
            f"No RabbitMQ: set AMQP_URL, start Docker, or install rabbitmq-server. {reason}"
        ) from None
    (server,) = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
    (programs,) = root.glob("usr/lib/erlang/erts-*/bin")
    # The script `erl` runs this program with the paths of an installed Erlang.
    with suppress(FileExistsError):
        (root / "erl").symlink_to(programs.relative_to(root) / "erlexec")
    return Programs(
        server=server,
        epmd=programs / "epmd",
        environment={
            "PATH": f"{root}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": packages.library_path(root),
            "ROOTDIR": str(root / "usr" / "lib" / "erlang"),
            "BINDIR": str(programs),
            "EMU": "beam",
            "PROGNAME": "erl",
        },
    )


def _installed_programs() -> Programs | None:
    server = str(_DEBIAN_SERVER) if _DEBIAN_SERVER.exists() else shutil.which("rabbitmq-server")
    epmd = shutil.which("epmd")
    return Programs(server=Path(server), epmd=Path(epmd)) if server and epmd else None


def _environment(folder: Path, *, port: int, epmd_port: int) -> Mapping[str, str]:
    """Return the environment of a node that shares nothing with other nodes on this machine."""
    (folder / "home").mkdir(mode=0o700, exist_ok=True)
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\n"
        f"default_pass = {secret_in(folder / 'password')}\n"  # of the user guest
        "disk_free_limit.absolute = 50MB\nmax_message_size = 131072\n"
    )
    return {
        **{name: os.environ[name] for name in os.environ if not name.startswith(("RABBITMQ_", "ERL_"))},
        "HOME": str(folder / "home"),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": "calculation-requests@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        # An idle node's schedulers do not spin, and other machines cannot reach it.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"
        ),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_LOGS": "-",
        # Makes the start script exec the server instead of waiting for it.
        "RUNNING_UNDER_SYSTEMD": "true",
    }
