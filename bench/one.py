"""Takes one sample of one measurement and prints it as JSON; always run inside a nest.

``python -m bench.one MEASURE DRIVER COUNT VARIANT DIRECTORY [--quick]``
"""

import json
import os
import sys
from pathlib import Path

from bench.drivers import DRIVERS
from bench.measures import MEASURES, Setting


def main() -> None:
    """Take the sample that the arguments name."""
    measure, driver, count, variant, directory = sys.argv[1:6]
    setting = Setting(Path(directory), quick="--quick" in sys.argv, variant=variant)
    load_before = os.getloadavg()[0]
    sample = MEASURES[measure].run(DRIVERS[driver], int(count), setting)
    print(json.dumps({**sample, "load": load_before}))


if __name__ == "__main__":
    main()
