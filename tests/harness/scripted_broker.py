"""A broker with enough of AMQP 0-9-1 for a publisher, whose replies come from a script."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from tests.harness.loopback_server import LoopbackServer

_START = commands.Connection.Start(
    server_properties={"capabilities": {"publisher_confirms": True, "basic.nack": True}}, mechanisms="PLAIN"
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


@dataclass(frozen=True)
class Script:
    """The broker's replies to the next window, sent once all its messages have arrived.

    There is one reply for each message; further messages get `ack`. `order` permutes the replies. With
    `multiple`, one frame confirms the whole window if all its replies are `ack`.
    """

    replies: Sequence[Literal["ack", "nack", "return", "silence", "close channel", "close connection"]]
    order: Sequence[int] = ()
    multiple: bool = False


NO_SCRIPT = Script([])


class ScriptedBroker(LoopbackServer):
    """Takes messages. `taken` lists the events that a real broker would have queued."""

    def __init__(self) -> None:
        super().__init__()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self.connections = 0  # accepted so far
        self.taken: list[str] = []
        self.confirmed: set[str] = set()
        self.script = NO_SCRIPT
        # Cleared during an alarm: like RabbitMQ, it then blocks a connection once it has read a header, and
        # reads nothing more from it. So it still confirms an empty message, and gets no body.
        self.reading = asyncio.Event()
        self.reading.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await _Conversation(self, reader, writer).run()


@dataclass
class _Message:
    """A published message, with the number and the reply that it gets once it is complete."""

    channel: int
    publish: commands.Basic.Publish
    header: ContentHeader
    event_id: str
    body: bytes = b""
    tag: int = 0
    reply: str = "ack"


@dataclass
class _Conversation:
    """One connection of a publisher."""

    broker: ScriptedBroker
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tag: int = 0
    window: list[_Message] = field(default_factory=list)  # complete, and without a reply so far
    timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        await self.reader.readexactly(8)  # the protocol's name and version
        self._send(0, _START)
        while True:
            channel, received = await self._next_frame()
            if isinstance(received, commands.Basic.Publish):
                await self._take_message(channel, received)
            elif (answer := _ANSWERS.get(getattr(received, "name", ""))) is not None:
                self._send(channel, answer)

    async def _next_frame(self) -> tuple[int, Any]:
        head = await self.reader.readexactly(7)
        rest = await self.reader.readexactly(int.from_bytes(head[3:], "big") + 1)
        return frame.unmarshal(head + rest)[1:]

    async def _take_message(self, channel: int, publish: commands.Basic.Publish) -> None:
        _, header = await self._next_frame()
        message = _Message(channel, publish, header, header.properties.message_id or "")
        if header.body_size == 0:
            self._complete(message)
        if not self.broker.reading.is_set():
            self._send(0, commands.Connection.Blocked("low on memory"))
            await self.broker.reading.wait()
            self._send(0, commands.Connection.Unblocked())
        while len(message.body) < header.body_size:
            _, part = await self._next_frame()
            message.body += part.value
        if header.body_size:
            self._complete(message)

    def _send(self, channel: int, *frames: Any) -> None:
        self.writer.write(b"".join(frame.marshal(each, channel) for each in frames))

    def _complete(self, message: _Message) -> None:
        """Record a message once its body is complete, with the reply that the script has for it."""
        self.tag += 1
        message.tag = self.tag
        if message.publish.routing_key == "relay.probe":
            self._send(message.channel, commands.Basic.Ack(delivery_tag=message.tag))
            return
        message.reply = next(iter(self.broker.script.replies[len(self.window) :]), "ack")
        self.window.append(message)
        if message.reply not in ("nack", "return"):
            self.broker.taken.append(message.event_id)
        # Reply after a quiet moment: the broker does not know where a window ends.
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._reply_to_window)

    def _reply_to_window(self) -> None:
        window, self.window = self.window, []
        script, self.broker.script = self.broker.script, NO_SCRIPT
        if script.multiple and all(message.reply == "ack" for message in window):
            self.broker.confirmed.update(message.event_id for message in window)
            self._send(window[0].channel, commands.Basic.Ack(delivery_tag=window[-1].tag, multiple=True))
            return
        for index in dict.fromkeys([*script.order, *range(len(window))]):
            if index < len(window) and not self._reply(window[index]):
                return

    def _reply(self, message: _Message) -> bool:
        """Send one reply. Returns whether the channel is still open."""
        acknowledgement = commands.Basic.Ack(delivery_tag=message.tag)
        publish = message.publish
        match message.reply:
            case "return" if publish.mandatory:
                returned = commands.Basic.Return(312, "NO_ROUTE", publish.exchange, publish.routing_key)
                content = message.header, ContentBody(message.body)
                self._send(message.channel, returned, *content, acknowledgement)
            case "ack" | "return":  # Without `mandatory`, a message without a queue is confirmed.
                self.broker.confirmed.add(message.event_id)
                self._send(message.channel, acknowledgement)
            case "nack":
                self._send(message.channel, commands.Basic.Nack(delivery_tag=message.tag, requeue=False))
            case "close channel":
                self._send(message.channel, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
            case "close connection":
                self.writer.transport.abort()
        return not message.reply.startswith("close")
