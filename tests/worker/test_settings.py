"""The settings of the worker: an invalid one is named, and its value is not shown."""

import pytest

from service.settings import InvalidSetting, load
from tests.harness.command_line import call
from tests.harness.examples import SECRET_KEYS
from worker.mail.message import Sender
from worker.settings import EmailSettings, ProcessSettings, WorkerSettings

ENVIRONMENT = {
    "DATABASE_URL": "postgresql://127.0.0.1/calculations",
    "APP_URL": "https://app.example.com",
    "REQUEST_SECRET_KEYS": SECRET_KEYS,
    "AMQP_URL": "amqp://127.0.0.1/",
    "SMTP_URL": "smtp://127.0.0.1:2525",
    "MAIL_FROM": "Calculations <calculations@service.example.com>",
}


def test_required_settings_are_sufficient():
    settings = load(EmailSettings, ENVIRONMENT)
    load(ProcessSettings, {"DATABASE_URL": settings.database_url})  # of a role without RabbitMQ

    assert (settings.amqp_url, settings.relay_poll_seconds) == ("amqp://127.0.0.1/", 1.0)


@pytest.mark.parametrize("name", ["APP_URL", "REQUEST_SECRET_KEYS", "SMTP_URL", "MAIL_FROM"])
def test_only_the_role_that_sends_emails_needs_what_e_mails_need(name):
    given = {each: value for each, value in ENVIRONMENT.items() if each != name}

    load(WorkerSettings, given)
    ended = [call("worker", *roles, environment=given) for roles in (["notifications"], [])]

    assert {(one.status, one.errors) for one in ended} == {(1, f"missing environment variable {name}\n")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMQP_URL", "http://user:hunter2@127.0.0.1/"),
        ("AMQP_URL", "amqp://user:hunter2#x@127.0.0.1/"),
        ("SMTP_URL", "smtp://user:hunter2#x@127.0.0.1:25"),
        ("EMAIL_CONCURRENCY", "1000"),
        ("RETENTION_DAYS", "29"),
        ("CONSUMER_PREFETCH", "65536"),
    ],
)
def test_invalid_setting_is_named_and_not_shown(name, value):
    with pytest.raises(InvalidSetting, match=f"^{name}: ") as invalid:
        load(EmailSettings, {**ENVIRONMENT, name: value})

    assert "hunter2" not in str(invalid.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMQP_URL", "amqps://user:p%23s@rabbit.example:5671/vhost?heartbeat=5"),
        ("AMQP_URL", "amqp://guest:guest@[::1]:5672/%2F"),
        ("SMTP_URL", "smtp+starttls://user%40example.com:p%2Fs@mail.example:587"),
        ("SMTP_URL", "smtp://[::1]:25"),
        ("DATABASE_URL", "postgresql:///calculations?host=/run/postgresql"),
        ("DATABASE_URL", "postgres://user:p%23s@one:5432,two:5432/calculations"),
    ],
)
def test_urls_of_every_form_are_accepted(name, value):
    assert getattr(load(EmailSettings, {**ENVIRONMENT, name: value}), name.lower()) == value


@pytest.mark.parametrize(
    ("text", "sender"),
    [
        ("calc@example.com", Sender("", "calc@example.com")),
        ("Calc <calc@example.com>", Sender("Calc", "calc@example.com")),
        ('"Calc, Inc." <calc@example.com>', Sender("Calc, Inc.", "calc@example.com")),
        ("Calc <calc@bücher.example>", Sender("Calc", "calc@xn--bcher-kva.example")),
    ],
)
def test_sender_may_have_a_name_and_an_international_domain(text, sender):
    assert Sender.parse(text) == sender


@pytest.mark.parametrize(
    "text", ["Calc", "a@b.example, c@d.example", "Calc <>", "@example.com", "a b@example.com"]
)
def test_invalid_sender_is_named_and_not_shown(text):
    with pytest.raises(InvalidSetting, match=r"^MAIL_FROM: ") as invalid:
        Sender.parse(text)

    assert text not in str(invalid.value)
