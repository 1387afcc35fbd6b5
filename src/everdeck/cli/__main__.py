"""``python -m tidelock.cli`` is the same command."""

import sys

from tidelock.cli import main

sys.exit(main())
