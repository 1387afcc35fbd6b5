"""``python -m everdeck.cli`` is the same command."""

from everdeck.cli import command

command()
