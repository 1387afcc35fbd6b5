"""``python -m everdeck.cli`` is the same command."""

import sys

from everdeck.cli import main

sys.exit(main())
