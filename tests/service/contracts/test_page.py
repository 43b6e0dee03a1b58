"""The page that shows the OpenAPI document, the files that it loads, and the documents."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from service.contracts import asyncapi
from tests.harness.in_process import api_client


class References(HTMLParser):
    """Collects the files that a page loads, and what it links to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note the URL of an element's file."""
        urls = [value for name, value in attributes if name in {"src", "href"} and value]
        (self.linked if tag == "a" else self.loaded).extend(urls)


async def test_page_loads_nothing_from_elsewhere(shared_client):
    page = await shared_client.get("/schema", headers={"Authorization": ""})

    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "connect-src 'self';" in page.headers["Content-Security-Policy"]
    loaded = References(page.text).loaded
    assert {Path(urlsplit(url).path).suffix for url in loaded} == {".css", ".js", ".png"}
    for url in loaded:
        assert url.startswith("/schema/")
        asset = await shared_client.get(url, headers={"Authorization": ""})
        assert asset.status_code == 200
        if ".css" in url:
            assert all(used.startswith("data:") for used in re.findall(r"url\([\"']?([^)]*)", asset.text))


async def test_page_leads_to_both_documents(shared_client):
    linked = References((await shared_client.get("/schema")).text).linked
    served = await shared_client.get("/schema/asyncapi.json", headers={"Authorization": ""})

    assert {*linked} == {"/schema/openapi.json", "/schema/asyncapi.json"}
    assert served.headers["Content-Type"] == "application/json"
    assert served.json() == msgspec.to_builtins(asyncapi.document())


@pytest.mark.parametrize(
    "name",
    ["index.html", "nothing.js", "events", "..%2f__init__.py", "..%2fpage.py"],
)
async def test_other_files_are_not_served(shared_client, name):
    assert (await shared_client.get(f"/schema/{name}")).status_code == 404


async def test_page_names_the_issuer_and_what_its_tokens_need(service_settings):
    async with api_client(
        service_settings, None, auth_issuer="https://<issuer>", auth_audience="a&b", auth_tenant_claim="firm"
    ) as caller:
        page = (await caller.get("/schema")).text

    for named in ("https://<issuer>", "a&b", "firm", "request:write", "request:read"):
        assert f"<code>{named.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}</code>" in page


async def test_page_may_ask_for_a_token_where_the_token_url_is_known(service_settings):
    token_url = "https://issuer.test:8443/token?a=1&b=2"
    async with api_client(service_settings, None, auth_token_url=token_url) as caller:
        page = await caller.get("/schema")

    assert "connect-src 'self' https://issuer.test:8443;" in page.headers["Content-Security-Policy"]
