"""`make bench`: every benchmark in turn, and RESULTS.md from what they found."""

from benchmarks import exchange, overhead, small, startup, straggler, throughput
from benchmarks.results import FILE, write

sections = []
for benchmark in (exchange, overhead, throughput, small, straggler, startup):
    sections.append(benchmark.measure())
    write(sections)  # what is known so far, should a later one fail
print(f"written to {FILE}")
