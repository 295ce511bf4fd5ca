"""Everything that reads a run's record: progress, summary, audit, report."""

from squall.report.columns import History, history
from squall.report.coverage import Audit, audit
from squall.report.html import prepare_report, write_report
from squall.report.progress import ProgressViewer
from squall.report.reader import Reader
from squall.report.summary import Summary, summarize
from squall.report.viewers import Viewer, Viewers

__all__ = [
    "Audit",
    "History",
    "ProgressViewer",
    "Reader",
    "Summary",
    "Viewer",
    "Viewers",
    "audit",
    "history",
    "prepare_report",
    "summarize",
    "write_report",
]
