"""Everdeck beside its peers and beside the bare kernel, measured in one run on whatever machine this is.

``python -m bench`` installs the peers below ``bench/work``, runs every measurement in a process tree of its own,
keeps the raw numbers in ``bench/results`` (a file of JSON lines per run, which can be resumed) and writes
``docs/benchmarks.md`` from them. Ratios within one run are the result; absolute numbers carry machine and date.

- ``native/``   the worker that stamps its start time, the nest that leaves nothing behind, the kernel's own limit
- ``drivers/``  one file per manager, all behind the small interface of :mod:`bench.drivers.driver`
- ``hosts/``    the programs in which libraries are measured, so that the harness's own memory never counts
- ``measures``  what is measured; ``one`` runs a single measurement; ``report`` and ``plots`` write the page
"""
