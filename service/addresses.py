"""Connects to a server with several addresses, some of which may not answer because a machine has vanished.

The libraries try hosts, and event loops the addresses of a host, in turn. The first that does not answer
would use up the time of every attempt. asyncio's `happy_eyeballs_delay`, which uvloop lacks, would not help
if a silent machine still accepts connections.
"""

import socket
from asyncio.staggered import staggered_race  # undocumented; asyncio itself connects by it
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import uvloop

_MOST_ATTEMPTS = 20

Connected = TypeVar("Connected")

# How many addresses the current attempt passes over, and which ones, as far as they are found.
_passed_over: ContextVar[tuple[int, set[Any]] | None] = ContextVar("_passed_over", default=None)

# The latest address that was tried for a host and port of the settings. asyncpg's requests to cancel a
# statement, which are no attempts, go there.
_latest: dict[tuple[Any, Any], Any] = {}


class EventLoop(uvloop.Loop):
    """The event loop of both processes and of all commands. `connect_to_any` needs it."""

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Connect to the first address that the current attempt does not pass over."""
        if host is not None:
            if options.get("ssl"):
                options.setdefault("server_hostname", host)
            name = host, port
            if _passed_over.get() is not None:
                found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                _latest[name] = _first_left(address for *_, address in found)[0]
            host = _latest.get(name, host)
        return await super().create_connection(protocol_factory, host, port, **options)

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        """Connect to a socket, unless the current attempt passes over it."""
        return await super().create_unix_connection(protocol_factory, _first_left([path]), **options)


def _first_left(addresses: Iterable[Any]) -> Any:
    """Return the first address that the current attempt does not pass over. Raises OSError."""
    number, passed_over = _passed_over.get() or (0, set())
    for address in addresses:
        if address not in passed_over:
            if len(passed_over) == number:
                return address
            passed_over.add(address)
    raise OSError("Earlier attempts are trying every address.")


async def connect_to_any(connect: Callable[[], Awaitable[Connected]], *, seconds: float) -> Connected:
    """Return the first connection that an attempt by *connect* makes. The attempts overlap.

    The second attempt passes over one address, the third one over two, and so on. An attempt begins when the
    one before has failed, or has taken a fifth of *seconds*. Raises an error that a server has sent, such as
    a rejected login, or else that of the first attempt.
    """
    most = _MOST_ATTEMPTS

    async def attempt(number: int) -> Connected:
        nonlocal most
        passed_over: set[Any] = set()
        _passed_over.set((number, passed_over))
        try:
            return await connect()
        finally:
            if len(passed_over) < number:  # There are no more addresses.
                most = number

    # A generator, because `most` falls meanwhile.
    attempts = (partial(attempt, number) for number in range(_MOST_ATTEMPTS) if number < most)
    delay = min(seconds / 5, 2.0)  # RFC 8305 allows two seconds.
    connected, winner, errors = await staggered_race(attempts, delay)
    if winner is None:
        raise next((error for error in errors if not isinstance(error, OSError)), errors[0]) or TimeoutError
    return cast("Connected", connected)
