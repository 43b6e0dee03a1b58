"""The worker's own Prometheus metrics. The values of a label are few, and known in advance."""

import math
import time

from prometheus_client import Counter, Gauge, Histogram

from service.outbox.events import SENT

_DELIVERY_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)

# Counting stops here, to bound its cost. Then a gauge is too low.
COUNT_LIMIT = 10_000

outbox_pending = Gauge(
    "outbox_pending_events", "Events that have not failed and wait for no other; at most 10,000 are counted."
)
outbox_retrying = Gauge(
    "outbox_retrying_events",
    "Events that were refused and will be retried. At most 10,000 held events are examined.",
)
outbox_oldest_age = Gauge(
    "outbox_oldest_event_age_seconds", "Age of the oldest pending event, or 0 if there is none."
)
feed_held_back = Gauge("feed_held_back_seconds", "Age of the oldest event that feeds lack, or 0.")

events_published = Counter("relay_events_published_total", "Events that the broker confirmed.", ["type"])
delivery_seconds = Histogram(
    "relay_delivery_seconds", "From writing an event to RabbitMQ's confirm.", buckets=_DELIVERY_SECONDS
)
broker_blocked = Gauge("broker_blocked", "1 while an alarm of RabbitMQ blocks the relay.")
broker_connected = Gauge(
    "broker_connected", "1 while the RabbitMQ connection of this name is open.", ["connection"]
)

consumer_messages = Counter(
    "consumer_messages_total", "Messages taken from a queue, by outcome.", ["queue", "outcome"]
)
consumer_seconds = Histogram(
    "consumer_message_seconds", "From receiving a message to settling it.", ["queue"]
)
consumer_reading = Gauge("consumer_reading", "1 while the queue is being consumed.", ["queue"])
consumer_dead_letters = Gauge(
    "consumer_dead_letters",
    "Messages ready in this queue's dead-letter queue. Use the maximum over all processes.",
    ["queue"],
)

emails = Counter("emails_total", "Claims on e-mails that ended, by outcome.", ["outcome"])
emails_pending = Gauge("emails_pending", "E-mails neither accepted nor failed; at most 10,000 are counted.")
emails_oldest_age = Gauge(
    "emails_oldest_pending_age_seconds", "Age of the oldest pending e-mail, or 0 if there is none."
)
email_delivery_seconds = Histogram(
    "email_delivery_seconds",
    "From creating a request to the mail server's acceptance of its e-mail.",
    buckets=_DELIVERY_SECONDS,
)

bounces = Counter("bounces_total", "E-mails that have bounced, by whose fault it is.", ["fault"])
bounces_look_age = Gauge(
    "bounces_look_age_seconds",
    "Time since this process last read the mailbox of MAIL_FROM, or started to, if BOUNCES_URL is set.",
)

discrepancies = Gauge(
    "reconciliation_discrepancies", "Discrepancies found by the last reconciliation.", ["kind"]
)
reconciliation_age = Gauge(
    "reconciliation_age_seconds", "Time since this process's last reconciliation that succeeded."
)

OF_RELAY = (outbox_pending, outbox_retrying, outbox_oldest_age, feed_held_back)
FROM_POSTGRES = (*OF_RELAY, emails_pending, emails_oldest_age)

# NaN in a process until one of its roles sets the gauge, or forever if no role does.
for _gauge in (*FROM_POSTGRES, bounces_look_age, reconciliation_age):
    _gauge.set(math.nan)

# Create the series now, because Prometheus sees no increase in a series that starts at 1.
for _event in SENT:
    events_published.labels(_event.type)
for _outcome in ("sent", "postponed", "failed", "recipient_refused", "given_back", "internal_error"):
    emails.labels(_outcome)
for _fault in ("recipient", "sender"):
    bounces.labels(_fault)


def count_age(gauge: Gauge) -> None:
    """Let *gauge* count the seconds from now on."""
    since = time.monotonic()
    gauge.set_function(lambda: time.monotonic() - since)
