"""``tidelock schema``: what an editor needs to check tidelock.toml while it is written."""

import json
from argparse import ArgumentParser, Namespace

from tidelock.cli import DONE


def schema_options(parser: ArgumentParser) -> None:
    """Options of schema."""
    parser.epilog = (
        "example:\n"
        "  tidelock schema > tidelock.schema.json\n"
        "  (then, in the first line of tidelock.toml:  #:schema ./tidelock.schema.json)"
    )


def schema(_options: Namespace) -> int:
    """Print the JSON Schema of tidelock.toml."""
    from tidelock.config import json_schema

    print(json.dumps(json_schema(), indent=2))
    return DONE
