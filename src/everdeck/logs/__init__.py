"""A worker's log: written by the worker itself, rotated, read and followed by us.

:mod:`files` opens, marks and rotates; :mod:`ledger` remembers which bytes stand where; :mod:`reader` reads and follows,
with or without an owner; :mod:`text` makes a line safe to show; :mod:`show` prints; :mod:`keeper` is the owner's side.
"""
