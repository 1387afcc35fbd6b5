"""What people who use Tidelock need for their own tests.

:mod:`tidelock.testing.telegram` is a Bot API server on loopback that behaves as Telegram's does where it hurts.
It needs ``pip install tidelock[testing]``; this package itself imports nothing.
"""
