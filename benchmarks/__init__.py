"""Throughput of the backward and forward, compared with the installed baselines. `python -m benchmarks.run --help`."""
