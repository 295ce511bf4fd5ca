"""Everything that reads a run's record: progress, summary, audit, report."""

from squall.report.columns import History as History
from squall.report.columns import history as history
from squall.report.coverage import Audit as Audit
from squall.report.coverage import audit as audit
from squall.report.html import prepare_report as prepare_report
from squall.report.html import write_report as write_report
from squall.report.progress import ProgressViewer as ProgressViewer
from squall.report.reader import Reader as Reader
from squall.report.summary import Summary as Summary
from squall.report.summary import summarize as summarize
from squall.report.viewers import Viewer as Viewer
from squall.report.viewers import Viewers as Viewers
