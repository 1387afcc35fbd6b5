"""Tables in a terminal."""

from everdeck.cli import output


def test_a_table_is_as_wide_as_its_cells_and_obeys_nobody() -> None:
    """What a worker chose is shown, not carried out; colours take no room."""
    rows = [("alice", "running", ""), ("b\x1b[2J", "failed", "look at\nits log")]
    assert output.table(("NAME", "STATE", "NOTE"), rows).split("\n") == [
        "NAME      STATE    NOTE",
        "alice     running",
        r"b\x1b[2J  failed   look at\nits log",
    ]
    assert output.table(("NAME", "STATE", "NOTE"), rows, [{1: "32"}]).split("\n") == [
        "NAME      STATE    NOTE",
        "alice     \x1b[32mrunning\x1b[0m",
        r"b\x1b[2J  failed   look at\nits log",
    ]
