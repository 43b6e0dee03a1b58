"""The endpoints of the API, from its OpenAPI document, so that no test lists them by hand."""

from typing import Any, NamedTuple

from service import app

DOCUMENT = app.describe()


class Endpoint(NamedTuple):
    method: str
    path: str
    operation: dict[str, Any]

    @property
    def scopes(self) -> set[str]:
        return {scope for each in self._security for scope in each.get("access_token", ())}

    @property
    def schemes(self) -> set[str]:
        return {scheme for each in self._security for scheme in each}

    @property
    def body(self) -> Any:
        """A valid body, as large as the examples have one, or None if it takes no body."""
        examples = [each["value"] for each in self._content.get("examples", {}).values()]
        return max(examples, key=len, default=None)

    @property
    def schema(self) -> dict[str, Any]:
        return DOCUMENT["components"]["schemas"][self._content["schema"]["$ref"].rpartition("/")[2]]

    @property
    def _content(self) -> dict[str, Any]:
        return self.operation.get("requestBody", {}).get("content", {}).get("application/json", {})

    @property
    def _security(self) -> list[dict[str, list[str]]]:
        return self.operation.get("security", [])

    def at(self, uuid: str) -> str:
        return self.path.replace("{uuid}", uuid)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


ENDPOINTS = [
    Endpoint(method.upper(), path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]
