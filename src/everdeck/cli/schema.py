"""``everdeck schema``: what an editor needs to check everdeck.toml while it is written."""

import json
from argparse import ArgumentParser, Namespace

from everdeck.cli import DONE


def schema_options(parser: ArgumentParser) -> None:
    """Options of schema."""
    parser.epilog = (
        "example:\n"
        "  everdeck schema > everdeck.schema.json\n"
        "  (then, in the first line of everdeck.toml:  #:schema ./everdeck.schema.json)"
    )


def schema(_options: Namespace) -> int:
    """Print the JSON Schema of everdeck.toml."""
    from everdeck.config import json_schema

    print(json.dumps(json_schema(), indent=2))
    return DONE
