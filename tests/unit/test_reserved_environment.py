"""The environment that we write into a worker cannot be overwritten by its spec."""

from typing import Any

import pytest

from everdeck.errors import SpecError
from everdeck.model import Secret, WorkerSpec


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("inherit_env", {"inherit_env": ["EVERDECK_COOKIE"]}),
        ("secrets", {"secrets": {"EVERDECK_COOKIE": Secret("x", env=True)}}),
        ("env['PORT']", {"port": True, "env": {"PORT": "1"}}),
        ("env['PORT']", {"port": True, "inherit_env": ["PORT"]}),
    ],
)
def test_what_we_write_into_a_worker_cannot_be_overwritten(field: str, fields: dict[str, Any]) -> None:
    """A cookie from elsewhere would hide the tree from every scan; a second PORT would make the status lie."""
    with pytest.raises(SpecError) as refused:
        WorkerSpec.of(["true"], **fields)
    assert refused.value.field == field
