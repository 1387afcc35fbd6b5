"""Programs in which libraries are measured: ``python -m bench.hosts.NAME``, each a process of its own."""
