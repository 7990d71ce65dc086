"""What `regard` costs, measured beside its peers in the same process: `python -m benchmarks [names…] [--quick]`."""
