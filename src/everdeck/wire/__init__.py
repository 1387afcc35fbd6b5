"""The verbs as frames on ``STATE/deck.sock``: both ends, without a web framework.

:mod:`frames` is what travels, :mod:`requests` each verb as a value, :mod:`server` the owner's end, :mod:`line` the end
of a member in an event loop, and :mod:`client` the blocking end of a command line, which loads no asyncio.
"""
