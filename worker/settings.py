"""The settings that only the worker has, in addition to service/settings.py."""

from typing import Annotated

import msgspec

from service.settings import ADDRESS, AppUrl, NonBlank, Port, PostgresUrl, PublicUrl, Seconds, Settings

AmqpUrl = Annotated[str, msgspec.Meta(pattern=rf"\Aamqps?://{ADDRESS}")]


class ProcessSettings(Settings, frozen=True, kw_only=True):
    """What a worker needs in any role. Each role loads its own subclass: see ROLES in worker/process.py."""

    health_port: Port = 8001

    @property
    def work_timeout_seconds(self) -> float:
        """The deadline of one unit of work. It is longer than in the API, because no caller waits."""
        return 5 * self.database_timeout_seconds


class WorkerSettings(ProcessSettings, frozen=True, kw_only=True):
    """The settings of a role that uses RabbitMQ. Durations are in seconds."""

    listen_database_url: PostgresUrl | None = None  # for LISTEN, if DATABASE_URL leads to a pooler
    amqp_url: AmqpUrl
    broker_timeout_seconds: Seconds = 10.0

    relay_poll_seconds: Seconds = 1.0

    # At least 30 days, because EMAIL_GIVE_UP_SECONDS may be as long, and until then an e-mail is retried.
    retention_days: Annotated[int, msgspec.Meta(ge=30, le=36_500)] | None = None

    consumer_prefetch: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 256  # a short integer of AMQP


class EmailSettings(WorkerSettings, frozen=True, kw_only=True):
    """The settings of the role notifications. No other role sends e-mails."""

    app_url: AppUrl
    request_secret_keys: NonBlank
    smtp_url: Annotated[str, msgspec.Meta(pattern=rf"\A(smtp|smtp\+starttls|smtps)://{ADDRESS}")]
    mail_from: NonBlank
    email_concurrency: Annotated[int, msgspec.Meta(ge=1, le=100)] = 8
    email_rate: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0  # per second; 0 is no limit
    email_claim_seconds: Annotated[float, msgspec.Meta(ge=1, le=600)] = 30.0
    email_retry_seconds: Seconds = 30.0  # the first pause; the longest pause is 60 times as long
    email_give_up_seconds: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 5 * 86_400.0
    smtp_timeout_seconds: Seconds = 60.0  # for each reply; ten times as long for the reply to the content
    smtp_helo_name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9.:\[\]-]+\Z")] | None = None
    bounces_url: Annotated[str, msgspec.Meta(pattern=rf"\Aimaps?://{ADDRESS}")] | None = None
    bounces_poll_seconds: Annotated[float, msgspec.Meta(ge=1, le=300)] = 60.0  # BouncesNotRead: over 900
    bounces_token_url: PublicUrl | None = None  # whose query has the client's credentials

    @property
    def longest_email_pause_seconds(self) -> float:
        """The longest pause between two attempts at an e-mail: half an hour by default."""
        return 60 * self.email_retry_seconds
