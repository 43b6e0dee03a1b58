"""The page that shows the OpenAPI document, the files that it loads, and the documents."""

import html
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service import app
from tests.deploy.pages import API, README, WORKER
from tests.harness.command_line import run
from tests.harness.in_process import api_client
from tests.harness.processes import bare_environment

JOURNEY = CHECKOUT / "deploy" / "local" / "journey" / "templates"


def references(page: str) -> tuple[list[str], list[str]]:
    """Return the URLs that a page links to, and those of the files that it loads."""
    found = re.findall(r'<(\w+)\s[^>]*?\b(?:src|href)="([^"]+)"', page)
    return [url for tag, url in found if tag == "a"], [url for tag, url in found if tag != "a"]


async def test_page_loads_nothing_from_elsewhere(shared_client):
    page = await shared_client.get("/schema", headers={"Authorization": ""})

    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "connect-src 'self';" in page.headers["Content-Security-Policy"]
    _, loaded = references(page.text)
    loaded.remove("data:,")  # the empty icon, so that no browser asks for one
    assert {Path(urlsplit(url).path).suffix for url in loaded} == {".css", ".js"}
    for url in loaded:
        assert url.startswith("/schema/")
        asset = await shared_client.get(url, headers={"Authorization": ""})
        assert asset.status_code == 200
        if ".css" in url:
            assert all(used.startswith("data:") for used in re.findall(r"url\([\"']?([^)]*)", asset.text))


async def test_address_of_the_api_leads_to_the_page(shared_client):
    answer = await shared_client.get("/", headers={"Authorization": ""})

    assert (answer.status_code, answer.headers["Location"]) == (302, "/schema")


async def test_page_leads_to_both_documents_which_a_command_prints_without_any_setting(shared_client):
    linked, _ = references((await shared_client.get("/schema")).text)
    documents = {url for url in linked if not url.startswith("#")}
    assert documents == {"/schema/openapi.json", "/schema/asyncapi.json"}

    for name in ("openapi", "asyncapi"):
        served = await shared_client.get(f"/schema/{name}.json", headers={"Authorization": ""})
        printed = await run("service", name, environment=bare_environment())
        assert served.headers["Content-Type"] == "application/json"
        assert (printed.status, printed.errors) == (0, "")
        assert served.json() == msgspec.json.decode(printed.output)


def test_links_to_an_operation_lead_to_one_of_the_document():
    paths = app.describe()["paths"].items()
    named = [f"#{method}-{re.sub('[{}]', '-', path)}" for path, item in paths for method in item]
    links = re.findall('"(#[^"]+)"', (JOURNEY / "journey.html").read_text())
    for page in (README, API, WORKER):
        links += re.findall(r"/schema(#[^\s`)]+)", page.read_text())

    assert len(links) >= 4
    assert [link for link in links if link not in named] == []


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "events", "..%2f__init__.py", "..%2fpage.py"])
async def test_other_files_are_not_served(shared_client, name):
    response = await shared_client.get(f"/schema/{name}")

    assert response.status_code == 404
    assert response.json()["errors"][0]["code"] == "not_found"


async def test_page_names_the_issuer_and_what_its_tokens_need(service_settings):
    async with api_client(
        service_settings,
        None,
        auth_issuer="https://<issuer>",
        auth_audience="a&b",
        auth_client_claim="firm",
        auth_scope_prefix="id/",
    ) as caller:
        page = await caller.get("/schema")

    assert "the audience a&amp;b," in page.text
    for named in ("https://<issuer>", "firm", "id/request:write", "id/request:read"):
        assert f"<code>{html.escape(named)}</code>" in page.text


async def test_page_names_no_audience_where_none_is_needed(service_settings):
    changes = {"auth_audience": None, "auth_clients": "acme"}
    async with api_client(service_settings, None, **changes) as caller:
        page = (await caller.get("/schema")).text

    assert "audience" not in page
    assert "None" not in page
