"""The OpenAPI document against the running daemon, by schemathesis: no 5xx, nothing that the document does not say."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from support.cli_daemon import PATIENCE_SECONDS
from support.web_served import Served, served_at

schemathesis = pytest.importorskip("schemathesis")

# Adopting or replacing by a random pid would touch processes of this machine; streams never end.
LEFT_OUT = {"/api/v1/workers/{name}/adopt", "/api/v1/reload", "/api/v1/down", "/api/v1/messages"}
EXAMPLES = {"admin": 6, "operate": 2, "read": 2, "other team": 2}
ACTING = {"POST", "DELETE", "PUT", "PATCH"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon on TCP."""
    with served_at(tmp_path_factory.mktemp("schema") / "state") as served:
        yield served


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", EXAMPLES)
def test_every_operation_keeps_to_the_document(served: Served, role: str) -> None:
    """Random valid and invalid requests to every operation, as every role; the daemon supervises throughout."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    address = served.base
    options = ("--role", "admin", "--label", "team=other") if role == "other team" else ("--role", role)
    token = served.person.types("token", "create", role.replace(" ", "-"), *options).stdout.strip()
    served.person.types("start", "alice", "--replace", "--", "sleep", "1000")
    before = served.person.worker("alice")["pid"]
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    document = httpx.get(f"{address}/openapi.json", timeout=PATIENCE_SECONDS).json()
    schema = schemathesis.openapi.from_dict(document)
    checks = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
    tried = 0
    calls: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in LEFT_OUT:
            continue
        tried += 1

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES[role],
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        def keeps_to_it(case: Any) -> None:
            if isinstance(case.query, dict):
                case.query.pop("follow", None)
            # Half of the time a worker that exists, which a random name never is.
            path = case.operation.path
            calls[path] = calls.get(path, 0) + 1
            if "name" in case.path_parameters and calls[path] % 2:
                case.path_parameters["name"] = "alice"
            response = case.call(base_url=address, headers=headers, timeout=PATIENCE_SECONDS)
            case.validate_response(response, checks=checks)
            if role == "read" and case.operation.method.upper() in ACTING:
                assert response.status_code >= 400, (path, response.status_code)
            if role == "other team" and response.status_code < 400:
                assert "alice" not in response.text, (path, response.text)

        keeps_to_it()
    assert tried >= 15
    health = httpx.get(f"{address}/healthz", timeout=PATIENCE_SECONDS).json()
    assert health == {"up": True, "supervised": True}
    if role in {"read", "other team"}:
        assert served.person.worker("alice")["pid"] == before
