"""Every manager that is measured. To add one: write its driver beside the others and name it here."""

from bench.drivers.circus import Circus
from bench.drivers.driver import Driver
from bench.drivers.everdeck import Daemon, Facade, Library, OneByOne, OneByOneUnsynced, Pure
from bench.drivers.honcho import Honcho
from bench.drivers.limits import Popen, PosixSpawn
from bench.drivers.pm2 import Pm2
from bench.drivers.runit import Runit
from bench.drivers.s6 import S6
from bench.drivers.supervisor import Supervisor
from bench.drivers.workerdeck import WorkerDeck

DRIVERS: dict[str, type[Driver]] = {
    driver.name: driver
    for driver in (
        PosixSpawn,
        Popen,
        Library,
        OneByOne,
        OneByOneUnsynced,
        Pure,
        Facade,
        Daemon,
        S6,
        Runit,
        Supervisor,
        Circus,
        Pm2,
        WorkerDeck,
        Honcho,
    )
}
