"""The only place that knows pids, signals and file descriptors.

Synchronous: no asyncio, no threads. Modules hand out file descriptors; whoever calls owns the waiting.
Every ``OSError`` leaves this package as one of :mod:`everdeck.errors`, translated once.
"""
