"""Benchmarks: Squall and its peers on the same work."""
