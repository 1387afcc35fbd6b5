"""The OpenAPI document against the running daemon, by schemathesis: no 5xx, nothing that the document does not say."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from support.cli_daemon import PATIENCE_SECONDS, Person

schemathesis = pytest.importorskip("schemathesis")

# Adopting or replacing by a random pid would touch processes of this machine; streams never end.
LEFT_OUT = {"/api/v1/workers/{name}/adopt", "/api/v1/reload"}
EXAMPLES = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A daemon on TCP with one worker; gives its address and its token."""
    person = Person(tmp_path_factory.mktemp("schema") / "state")
    try:
        person.types("up", "--detach", "--listen", "127.0.0.1:0")
        person.types("start", "alice", "--", "sleep", "1000")
        log = (person.state / "daemon.log").read_text()
        address = next(word for word in log.split() if word.startswith("http://")) if "http://" in log else ""
        if not address:
            # The first start shows the link on the terminal only; every later one tells the address in its log.
            person.kills(person.owner())
            person.types("up", "--detach", "--listen", "127.0.0.1:0")
            log = (person.state / "daemon.log").read_text()
            address = next(word for word in log.split() if word.startswith("http://"))
        yield address.rstrip("/"), (person.state / "token").read_text().strip()
    finally:
        person.leaves()


@pytest.mark.timeout(300)
def test_every_operation_keeps_to_the_document(served: tuple[str, str]) -> None:
    """Random valid and invalid requests to every operation; the daemon supervises throughout."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    address, token = served
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
            max_examples=EXAMPLES,
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

        keeps_to_it()
    assert tried >= 15
    health = httpx.get(f"{address}/healthz", timeout=PATIENCE_SECONDS).json()
    assert health == {"up": True, "supervised": True}
