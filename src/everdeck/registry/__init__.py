"""What the deck noted down for its later selves: SQLite, and all SQL of the deck.

The kernel is the truth; a record here says what was wanted and whom we believed to be running it.
"""

from everdeck.registry.store import Registry, Telling, WorkerRecord, check_writable, read_only

__all__ = ["Registry", "Telling", "WorkerRecord", "check_writable", "read_only"]
