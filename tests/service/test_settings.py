"""Settings and the key ring: an error names the variable and never shows its value."""

from itertools import product

import pytest

from service.calculation_requests.request_secrets import SecretKeyMissing, SecretKeyRing
from service.identifiers import new_request_id
from service.settings import InvalidSetting, ServiceSettings, load
from tests.harness.examples import SECRET_KEYS

UNFIT = "this value is not as deploy/reference.md says"
ENVIRONMENT = {
    "DATABASE_URL": "postgresql://localhost/x",
    "APP_URL": "https://app.example.com",
    "REQUEST_SECRET_KEYS": SECRET_KEYS,
    "AUTH_ISSUER": "https://issuer.test",
    "AUTH_AUDIENCE": "calculation-requests",
    "AUTH_JWKS_URL": "https://issuer.test/jwks",
}


def test_settings_are_read_from_the_environment_and_a_missing_one_is_named():
    changes = {"PORT": "8080", "AUTH_LEEWAY_SECONDS": "1.5", "LOG_LEVEL": ""}
    settings = load(ServiceSettings, ENVIRONMENT | changes)

    assert (settings.port, settings.auth_leeway_seconds, settings.log_level) == (8080, 1.5, "INFO")
    for name in ENVIRONMENT:
        with pytest.raises(InvalidSetting, match=f"missing environment variable {name}|{name} is missing"):
            load(ServiceSettings, {**ENVIRONMENT, name: ""})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PORT", "eighty", "Expected an integer"),
        ("DATABASE_TIMEOUT_SECONDS", "-1", "Expected a number > 0"),
        ("LOG_LEVEL", "LOUD", UNFIT),
        ("APP_URL", "app.example.com", UNFIT),
        ("AUTH_JWKS_URL", "http://issuer.test/jwks", UNFIT),
        ("AUTH_TOKEN_TYPES", 'JWT, "', UNFIT),
        ("AUTH_SCOPE_PREFIX", 'id"/', UNFIT),
    ],
)
def test_invalid_variable_is_named_with_the_reason_and_its_value_not_shown(name, value, reason):
    with pytest.raises(InvalidSetting, match=f"^{name}: {reason}") as failure:
        load(ServiceSettings, {**ENVIRONMENT, name: value})

    assert value not in str(failure.value)


def test_without_an_audience_the_clients_must_be_listed():
    environment = ENVIRONMENT | {"AUTH_AUDIENCE": "", "AUTH_TOKEN_TYPES": "none"}

    for clients in ("", " , ", "\t"):
        with pytest.raises(InvalidSetting, match="AUTH_AUDIENCE is missing: without it, AUTH_CLIENTS"):
            load(ServiceSettings, environment | {"AUTH_CLIENTS": clients})
    assert load(ServiceSettings, environment | {"AUTH_CLIENTS": "acme"}).auth_audience is None


def test_invalid_key_ring_is_rejected_without_showing_a_key():
    key = "A" * 43
    for text in (
        "",
        "id",
        "id:",
        f"id:{key[1:]}",
        "id:A,",
        f":{key}",
        f"id:{'!' * 43}",
        f"id:{key},id:{key}",
    ):
        with pytest.raises(InvalidSetting, match="REQUEST_SECRET_KEYS") as failure:
            SecretKeyRing.parse(text)
        assert "AAA" not in str(failure.value)


def test_secrets_differ_by_request_salt_and_key_whatever_its_name():
    ring = SecretKeyRing.parse(SECRET_KEYS)
    ids, salts, keys = [new_request_id(), new_request_id()], [b"a" * 16, b"b" * 16], [*ring.keys]
    secrets = {ring.secret(id_, salt=salt, key_id=key) for id_, salt, key in product(ids, salts, keys)}

    assert len(secrets) == 8
    assert {len(secret) for secret in secrets} == {43}
    first, second = (SecretKeyRing.parse(f"id:{letter * 43}") for letter in "AB")
    with pytest.raises(SecretKeyMissing):
        second.secret(ids[0], salt=salts[0], key_id=first.current_id)
