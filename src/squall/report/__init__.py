"""Everything that reads a run's record: progress, summary, audit, report."""

from squall.report.coverage import Audit, audit
from squall.report.html import prepare_report, write_report
from squall.report.progress import Progress
from squall.report.reader import Reader
from squall.report.summary import Summary, summarize

__all__ = ["Audit", "Progress", "Reader", "Summary", "audit", "prepare_report", "summarize", "write_report"]
