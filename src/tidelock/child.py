"""For workers: leave when the parent dies, say when you are ready, run once.

This file is the worker's side of Tidelock. It stands alone: standard library only, no other module of the
package, so a project that does not want the dependency can copy it as one file.
"""

from typing import Final

WORKER_ENV: Final = "TIDELOCK_WORKER"
DIR_ENV: Final = "TIDELOCK_DIR"
COOKIE_ENV: Final = "TIDELOCK_COOKIE"
LIFELINE_FD_ENV: Final = "TIDELOCK_LIFELINE_FD"
NOTIFY_SOCKET_ENV: Final = "NOTIFY_SOCKET"
CREDENTIALS_DIRECTORY_ENV: Final = "CREDENTIALS_DIRECTORY"
PORT_ENV: Final = "PORT"
WATCHDOG_USEC_ENV: Final = "WATCHDOG_USEC"
WATCHDOG_PID_ENV: Final = "WATCHDOG_PID"
EVENT_FIELD: Final = "X_TIDELOCK_EVENT"
