"""A broker with enough of AMQP 0-9-1 for a publisher, whose replies come from a script."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import msgspec
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader, ProtocolHeader

Reply = Literal["ack", "nack", "return", "drop", "silence", "close channel", "close connection"]

_START = commands.Connection.Start(
    version_major=0,
    version_minor=9,
    server_properties={"capabilities": {"publisher_confirms": True, "basic.nack": True}},
    mechanisms="PLAIN",
    locales="en_US",
)
_ANSWERS: dict[str, Any] = {
    "Connection.StartOk": commands.Connection.Tune(channel_max=16, frame_max=131_072, heartbeat=0),
    "Connection.Open": commands.Connection.OpenOk(),
    "Connection.Close": commands.Connection.CloseOk(),
    "Channel.Open": commands.Channel.OpenOk(),
    "Channel.Close": commands.Channel.CloseOk(),
    "Confirm.Select": commands.Confirm.SelectOk(),
    "Exchange.Declare": commands.Exchange.DeclareOk(),
    "Queue.Declare": commands.Queue.DeclareOk(queue="any", message_count=0, consumer_count=0),
    "Queue.Bind": commands.Queue.BindOk(),
}


_QUIET_SECONDS = 0.01


class Script(msgspec.Struct, frozen=True):
    """The broker's replies to the next window, sent once all its messages have arrived.

    There is one reply for each message; further messages get `ack`. `order` permutes the replies. With
    `multiple`, one frame confirms the whole window if all its replies are `ack`.
    """

    replies: Sequence[Reply]
    order: Sequence[int]
    multiple: bool


class ScriptedBroker:
    """Listens on the loopback. `taken` lists the messages that a real broker would have queued."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.confirmed: set[str] = set()
        self.script = Script([], [], multiple=False)
        self.reading = asyncio.Event()  # cleared during an alarm: then nothing published is read
        self.reading.set()
        self.connections = 0  # accepted so far
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        """The AMQP_URL of this broker."""
        assert self._server is not None
        return f"amqp://guest:guest@127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    def raise_alarm(self) -> None:
        """Like RabbitMQ, block each connection once it has read a header, and read nothing more from it.

        So it still confirms an empty message, and gets no body.
        """
        self.reading.clear()

    def clear_alarm(self) -> None:
        """Unblock the connections."""
        self.reading.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await _Conversation(self, reader, writer).run()
        finally:
            self._connections.discard(task)
            writer.close()


class _Conversation:
    """One connection of a publisher."""

    def __init__(
        self, broker: ScriptedBroker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._broker = broker
        self._reader = reader
        self._writer = writer
        self._buffer = b""
        self._tag = 0
        self._held: list[tuple[int, int, str, Reply, Any]] = []
        self._publish: tuple[int, commands.Basic.Publish] | None = None
        self._header: ContentHeader | None = None
        self._body = b""
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Reply until the connection ends."""
        await self._reader.readexactly(len(ProtocolHeader(0, 9, 1).marshal()))
        self._send(0, _START)
        while True:
            channel, received = await self._next_frame()
            if isinstance(received, commands.Basic.Publish):
                self._publish, self._header, self._body = (channel, received), None, b""
            elif isinstance(received, ContentHeader):
                self._header = received
                self._complete()
                await self._wait_out_alarm()
            elif isinstance(received, ContentBody):
                self._body += received.value
                self._complete()
            elif (answer := _ANSWERS.get(getattr(received, "name", ""))) is not None:
                self._send(channel, answer)

    async def _wait_out_alarm(self) -> None:
        if not self._broker.reading.is_set():
            self._send(0, commands.Connection.Blocked("low on memory"))
            await self._broker.reading.wait()
            self._send(0, commands.Connection.Unblocked())

    async def _next_frame(self) -> tuple[int, Any]:
        while True:
            if len(self._buffer) >= 7:
                size = int.from_bytes(self._buffer[3:7], "big") + 8
                if len(self._buffer) >= size:
                    _, channel, received = frame.unmarshal(self._buffer[:size])
                    self._buffer = self._buffer[size:]
                    return channel, received
            chunk = await self._reader.read(65_536)
            if not chunk:
                raise ConnectionResetError
            self._buffer += chunk

    def _send(self, channel: int, *frames: Any) -> None:
        self._writer.write(b"".join(frame.marshal(each, channel) for each in frames))

    def _complete(self) -> None:
        """Record a message once its body is complete, with the reply that the script has for it."""
        assert self._publish is not None
        if self._header is None or len(self._body) < self._header.body_size:
            return
        channel, publish = self._publish
        self._tag += 1
        message_id = self._header.properties.message_id or ""
        if publish.routing_key == "relay.probe":
            self._send(channel, commands.Basic.Ack(delivery_tag=self._tag))
            return
        number = len(self._held)
        replies = self._broker.script.replies
        reply: Reply = replies[number] if number < len(replies) else "ack"
        if reply == "return" and not publish.mandatory:
            reply = "drop"
        returned = (publish, self._header, self._body)
        self._held.append((channel, self._tag, message_id, reply, returned))
        if reply in ("ack", "silence", "close channel", "close connection"):
            self._broker.taken.append(message_id)
        self._reply_when_quiet()

    def _reply_when_quiet(self) -> None:
        """Reply after a quiet moment: the broker does not know where a window ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._reply_to_all)

    def _reply_to_all(self) -> None:
        held, self._held = self._held, []
        script = self._broker.script
        self._broker.script = Script([], [], multiple=False)
        if script.multiple and all(reply == "ack" for *_, reply, _ in held):
            self._broker.confirmed.update(message_id for _, _, message_id, _, _ in held)
            self._send(held[0][0], commands.Basic.Ack(delivery_tag=held[-1][1], multiple=True))
            return
        in_order = dict.fromkeys([*script.order, *range(len(held))])
        for index in in_order:
            if index < len(held) and not self._reply(*held[index]):
                return

    def _reply(self, channel: int, tag: int, message_id: str, reply: Reply, returned: Any) -> bool:
        """Send one reply. Returns whether the channel is still open."""
        match reply:
            case "ack" | "drop":
                self._broker.confirmed.add(message_id)
                self._send(channel, commands.Basic.Ack(delivery_tag=tag))
            case "nack":
                self._send(channel, commands.Basic.Nack(delivery_tag=tag, requeue=False))
            case "return":
                publish, header, body = returned
                back = commands.Basic.Return(312, "NO_ROUTE", publish.exchange, publish.routing_key)
                self._send(channel, back, header, ContentBody(body), commands.Basic.Ack(delivery_tag=tag))
            case "close channel":
                self._send(channel, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
                return False
            case "close connection":
                self._writer.transport.abort()
                return False
            case "silence":
                pass
        return True
