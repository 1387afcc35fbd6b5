"""Stands before a package that jsonschema loads if it is there: its grammar costs every hub a third of its start."""

raise ImportError("no test of the hub checks an IRI")
