"""The daemon's log when it has no terminal."""

import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

MOST_LOG_BYTES: Final = 5_000_000


class OwnLog(RotatingFileHandler):
    """For the daemon's user only, and never larger than a few megabytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MOST_LOG_BYTES, backupCount=1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding="utf-8", line_buffering=True)
