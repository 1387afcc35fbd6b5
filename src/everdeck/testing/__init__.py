"""What people who use Everdeck need for their own tests.

:mod:`everdeck.testing.telegram` is a Bot API server on loopback that behaves as Telegram's does where it hurts.
It needs ``pip install everdeck[testing]``; this package itself imports nothing.
"""
