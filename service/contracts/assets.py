"""What browsers load: compressed where they accept it, and files under names that change with the content."""

import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from litestar import Request, Response

# Swagger UI comes from `openapi-ui-bundles` (5.17, no dependencies): packages with newer versions depend on
# Django or FastAPI.
_SWAGGER_UI = resources.files("openapi_ui_bundles.swagger_ui") / "vendor"
_OUR_OWN = Path(__file__).parent / "static"
_ASSETS = {
    "swagger-ui.css": (_SWAGGER_UI, "text/css"),
    "swagger-ui-bundle.js": (_SWAGGER_UI, "text/javascript"),
    "favicon-32x32.png": (_SWAGGER_UI, "image/png"),
    "page.css": (_OUR_OWN, "text/css"),
    "page.js": (_OUR_OWN, "text/javascript"),
}
# `gzip` with any weight but 0 (RFC 9110, section 12.5.3).
_GZIP = re.compile(r"(^|,)\s*gzip\s*(;\s*q=(?!0(\.0*)?\s*(,|$))[\d.]+\s*)?(,|$)", re.IGNORECASE)


class Content(msgspec.Struct, frozen=True):
    """A body, and the same body compressed."""

    body: bytes
    compressed: bytes
    media_type: str

    @classmethod
    def of(cls, body: bytes, media_type: str) -> "Content":
        """Return *body* with its compressed form."""
        return cls(body, gzip.compress(body, mtime=0), media_type)

    def answer(
        self, request: Request[Any, Any, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> Response[bytes]:
        """Return the answer to *request*: compressed if the caller accepts that."""
        is_compressed = _GZIP.search(",".join(request.headers.getall("accept-encoding", []))) is not None
        return Response(
            self.compressed if is_compressed else self.body,
            media_type=self.media_type,
            headers={
                "Vary": "Accept-Encoding",
                "X-Content-Type-Options": "nosniff",
                **({"Content-Encoding": "gzip"} if is_compressed else {}),
                **headers,
            },
        )


@cache
def named() -> Mapping[str, Content]:
    """Return the files by their names in a URL. The first call takes a tenth of a second."""
    return {_name_in_url(name, content): content for name, content in _contents().items()}


@cache
def url(name: str) -> str:
    """Return the URL of a file of `_ASSETS`."""
    return f"/schema/{_name_in_url(name, _contents()[name])}"


@cache
def _contents() -> dict[str, Content]:
    return {
        name: Content.of((folder / name).read_bytes(), media_type)
        for name, (folder, media_type) in _ASSETS.items()
    }


def _name_in_url(name: str, content: Content) -> str:
    """Return the name with a hash of the content: a browser keeps the file until the name changes."""
    stem, _, suffix = name.partition(".")
    return f"{stem}.{hashlib.sha256(content.body).hexdigest()[:16]}.{suffix}"
