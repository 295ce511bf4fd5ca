"""`python -m benchmarks.papers [name ...]`: try the claims again; docs/results.md gets what is found."""

import sys
from importlib import import_module

from benchmarks.papers.page import NAMES

for name in sys.argv[1:] or NAMES:
    print(name, flush=True)
    import_module(f"benchmarks.papers.{name}").measure()
