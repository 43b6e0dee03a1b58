"""The endpoints of the API, from its OpenAPI document, so that no test lists them by hand."""

from typing import Any, NamedTuple

from service import app

DOCUMENT = app.describe()


class Endpoint(NamedTuple):
    method: str
    path: str
    operation: dict[str, Any]
    scopes: set[str]  # of access tokens that open it
    schemes: set[str]  # the kinds of tokens that open it
    schema: dict[str, Any]  # of its body
    body: Any  # as large as the examples have one, or None if it takes no body

    def at(self, uuid: str) -> str:
        return self.path.replace("{uuid}", uuid)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> Endpoint:
    security = operation.get("security", [])
    scopes = {scope for each in security for scope in each.get("access_token", ())}
    schemes = {scheme for each in security for scheme in each}
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    schema = DOCUMENT["components"]["schemas"].get(name, {})
    examples = [each["value"] for each in content.get("examples", {}).values()]
    body = max(examples, key=len, default=None)
    return Endpoint(method.upper(), path, operation, scopes, schemes, schema, body)


ENDPOINTS = [
    _endpoint(method, path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]
