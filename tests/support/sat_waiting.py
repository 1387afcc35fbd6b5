"""The names that the tests of satellites know; see :mod:`support.waiting`."""

from support.waiting import eventually as until

until_async = until

__all__ = ["until", "until_async"]
