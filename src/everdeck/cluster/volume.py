"""Where things are inside of a worker's pod: what its deck, its doors and those who write its manifest agree on."""

import os
from pathlib import Path
from typing import Final

VOLUME: Final = Path(os.environ.get("EVERDECK_VOLUME", "/everdeck"))
STATE: Final = VOLUME / "deck"
GIVEN: Final = Path(os.environ.get("EVERDECK_GIVEN", "/etc/everdeck"))
RESTART: Final = "restart-"  # so begins the id of a start that is one
SPEC_FILE: Final = "spec.json"
SECRET_PREFIX: Final = "secret."  # noqa: S105 - the beginning of a file's name
