"""Reads the mailbox of MAIL_FROM, and records which sent e-mails have bounced.

A report is recorded before it is removed. Several processes may read one: only a sent e-mail can bounce.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

import structlog

from service.calculation_requests.changing import change_all
from service.calculation_requests.email_changes import EmailEnd, EmailId, announce_ends
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line.connecting import reason
from service.outbox.waking import RelayWaker
from service.postgres import connections
from service.postgres.outages import PostgresUnavailable
from service.postgres.pool import Pool
from service.server.background import in_background
from worker import metrics
from worker.mail import mailbox, reports
from worker.mail.mailbox import MailboxUnavailable
from worker.mail.replies import Reply
from worker.settings import EmailSettings

_log = structlog.get_logger()


async def run(settings: EmailSettings, pool: Pool, relay: RelayWaker, stop: asyncio.Event) -> None:
    """Look into the mailbox at intervals until *stop*, which does not wait for the end of a look."""
    metrics.count_age(metrics.bounces_look_age)
    async with in_background("bounces", partial(_keep_looking, settings, pool, relay)):
        await stop.wait()


async def _keep_looking(settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
    while True:
        await asyncio.sleep(settings.bounces_poll_seconds)  # also after an unexpected error
        try:
            await look(settings, pool, relay)
        except (MailboxUnavailable, PostgresUnavailable) as error:
            _log.warning("bounces_not_read", reason=reason(error))


async def look(settings: EmailSettings, pool: Pool, relay: RelayWaker) -> None:
    """Handle the newest new messages. Raises MailboxUnavailable and PostgresUnavailable."""
    loop, keys = asyncio.get_running_loop(), SecretKeyRing.parse(settings.request_secret_keys)

    def handle() -> None:
        """Record what messages report, then mark those that were handled and those that are for people."""
        with mailbox.opened(settings) as opened:
            read = ((uid, opened.beginning_of(uid)) for uid in opened.find_new())
            found = {uid: reports.read(content, keys) for uid, content in read if content is not None}
            failures = {each.email: each.failure for each in found.values() if each and each.failure}
            has_ended: dict[EmailId, bool] = {}
            if failures:
                recorded = _record(failures, settings, pool, relay)
                has_ended = asyncio.run_coroutine_threadsafe(recorded, loop).result()
            handled, for_people = [], []
            for uid, report in found.items():
                if report and (report.failure is None or has_ended.get(report.email)):
                    handled.append(uid)
                # A report whose e-mail is pending or locked is read again until the e-mail has ended.
                elif not report or report.email not in has_ended:
                    for_people.append(uid)
            opened.mark(handled, for_people)

    await mailbox.in_thread(handle)
    metrics.count_age(metrics.bounces_look_age)


async def _record(
    failures: Mapping[EmailId, Reply], settings: EmailSettings, pool: Pool, relay: RelayWaker
) -> dict[EmailId, bool]:
    """Record and announce bounces. Returns which e-mails exist, and whether they have ended by now."""
    ids = {email.request_id for email in failures}
    async with (
        connections.transaction(pool, seconds=settings.work_timeout_seconds) as connection,
        change_all(connection, ids, waits=False) as requests,
    ):
        rows = await connection.fetch(_LOCK, ids, list(requests))
        emails = {EmailId(*id_): (state, traceparent) for *id_, state, traceparent in rows}
        bounced = [
            EmailEnd(email, failure.words, "bounced", failure.code, emails[email][1])
            for email, failure in failures.items()
            if email in emails and emails[email][0] == "sent"
        ]
        await announce_ends(connection, bounced, requests)
    relay.wake()
    for end in bounced:
        metrics.bounces.labels("sender" if reports.blames_us(failures[end.id]) else "recipient").inc()
    _log.info("bounces_read", failures=len(failures), bounced=len(bounced))
    return {email: state in {"sent", "failed"} for email, (state, _) in emails.items()}


# The e-mails of requests that were not erased. An e-mail has no state if it, or its request, is locked by
# another transaction.
_LOCK = """
    SELECT email.request_id, email.number, email.kind, locked.state, locked.traceparent
      FROM email
      JOIN calculation_request AS request ON request.id = email.request_id
      LEFT JOIN LATERAL (SELECT state, traceparent
                           FROM email AS same
                          WHERE (same.request_id, same.number) = (email.request_id, email.number)
                            AND same.request_id = ANY($2)
                            FOR UPDATE SKIP LOCKED) AS locked ON true
     WHERE email.request_id = ANY($1)
"""
