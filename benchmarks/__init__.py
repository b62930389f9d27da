"""Throughput of the backward and forward, beside the peers that are installed. `python -m benchmarks.run --help`."""
