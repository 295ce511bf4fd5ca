"""`python -m benchmarks.papers [name ...]`: try the claims again; docs/results.md gets what is found."""

import sys
from typing import Any

from benchmarks.papers import backup, delay, staleness

CLAIMS: dict[str, Any] = {"staleness": staleness, "delay": delay, "backup": backup}

for name in sys.argv[1:] or CLAIMS:
    print(name, flush=True)
    CLAIMS[name].measure()
