"""Benchmarks: each prints ratios to a reference that is measured in the same run. Start them with `make bench`."""
