"""``python -m everdeck.satellites KIND``: what a satellite runs."""

import sys

from everdeck.satellites.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
