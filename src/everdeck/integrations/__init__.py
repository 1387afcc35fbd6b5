"""Doors for programs that others wrote; each stands on the contract of :mod:`everdeck.verbs`."""
