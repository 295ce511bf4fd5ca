"""Claims of the papers, tried on real data in virtual time. `python -m benchmarks.papers` writes docs/results.md."""
