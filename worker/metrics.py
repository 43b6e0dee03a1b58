"""What the worker counts for Prometheus, beside what both processes do. Labels are bounded sets."""

from collections import Counter as Numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from prometheus_client import Counter, Gauge, Histogram

from service.outbox.events import EVENT_TYPES
from service.telemetry.metrics import UNKNOWN
from worker.relay.outbox import OutboxRow

_DELIVERY_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)

outbox_pending = Gauge("outbox_pending_events", "Events in the outbox that the broker has not refused.")
outbox_failing = Gauge("outbox_failing_events", "Events that the broker refused, to be tried again.")
outbox_waiting = Gauge("outbox_waiting_events", "Events behind a failing or parked one of their request.")
outbox_parked = Gauge("outbox_parked_events", "Events put aside: they cannot be encoded, or by an operator.")
outbox_oldest_age = Gauge(
    "outbox_oldest_event_age_seconds", "Age of the oldest pending event; 0 when there is none."
)

events_published = Counter("relay_events_published_total", "Events that the broker confirmed.", ["type"])
events_failed = Counter("relay_events_failed_total", "Events that were themselves at fault.", ["reason"])
confirm_seconds = Histogram(
    "relay_confirm_seconds",
    "From the publishing of a window to its last confirm.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
unconfirmed_events = Gauge("relay_unconfirmed_events", "Events of the window that is being published.")
delivery_seconds = Histogram(
    "relay_delivery_seconds", "From the writing of an event to its confirm.", buckets=_DELIVERY_SECONDS
)
wakeups = Counter("relay_wakeups_total", "What ended a rest of the relay.", ["source"])
outages = Counter("relay_outages_total", "How often the relay lost what it depends on.", ["dependency"])
lanes_passed_over = Counter(
    "relay_lanes_passed_over_total", "Lanes in which an event was found before the low-water mark."
)
broker_blocked = Gauge("broker_blocked", "1 while the broker's alarm keeps the relay from publishing.")
broker_connected = Gauge(
    "broker_connected", "1 while the connection of this name to RabbitMQ is open.", ["connection"]
)

consumer_messages = Counter(
    "consumer_messages_total", "Messages by what became of them.", ["queue", "outcome"]
)
consumer_seconds = Histogram("consumer_message_seconds", "From a message to its settling.", ["queue"])
consumer_reading = Gauge("consumer_reading", "1 while the queue is being read.", ["queue"])

emails = Counter("emails_total", "Attempts at e-mails by what became of them.", ["outcome"])
emails_pending = Gauge("emails_pending", "E-mails neither accepted nor refused for good.")
emails_oldest_age = Gauge(
    "emails_oldest_pending_age_seconds", "Age of the oldest pending e-mail; 0 when there is none."
)
email_delivery_seconds = Histogram(
    "email_delivery_seconds",
    "From the intent to send an e-mail to its acceptance by the mail server.",
    buckets=_DELIVERY_SECONDS,
)

discrepancies = Gauge(
    "reconciliation_discrepancies", "What did not add up when it was last looked at.", ["kind"]
)
reconciled_at = Gauge(
    "reconciliation_last_success_timestamp_seconds", "When that was, in seconds since the epoch."
)

READ_FROM_POSTGRES = (
    outbox_pending, outbox_failing, outbox_waiting, outbox_parked, outbox_oldest_age,
    emails_pending, emails_oldest_age,
)  # fmt: skip

# Only the role that reads them can tell.
for _gauge in (*READ_FROM_POSTGRES, reconciled_at):
    _gauge.set(UNKNOWN)

# Series are there from the start, so that the first one counted is an increase.
for _type in (*EVENT_TYPES, "other"):
    events_published.labels(_type)
for _reason in ("returned", "refused", "unencodable"):
    events_failed.labels(_reason)
for _source in ("notify", "poll"):
    wakeups.labels(_source)
for _dependency in ("rabbitmq", "postgres"):
    outages.labels(_dependency)
for _outcome in ("sent", "postponed", "failed", "given_back", "put_off"):
    emails.labels(_outcome)


def count_settled(events: Sequence[OutboxRow]) -> None:
    """Count events that were confirmed and have left the outbox; types that are none of ours count as one."""
    now = datetime.now(UTC)
    for event_type, number in Numbers(event.type for event in events).items():
        events_published.labels(event_type if event_type in EVENT_TYPES else "other").inc(number)
    for event in events:
        delivery_seconds.observe(max(0.0, (now - event.created_at).total_seconds()))


@contextmanager
def holding(gauge: Gauge, value: float) -> Iterator[None]:
    """Let a gauge show *value* until the block is left, and then 0."""
    gauge.set(value)
    try:
        yield
    finally:
        gauge.set(0)
