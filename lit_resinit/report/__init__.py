"""What was measured, for people: tables, figures, and one HTML page."""

from lit_resinit.report.about import about_run as about_run
from lit_resinit.report.attribution import attribution_figure as attribution_figure
from lit_resinit.report.attribution import run_figure as run_figure
from lit_resinit.report.figures import activation_figure as activation_figure
from lit_resinit.report.figures import gate_figure as gate_figure
from lit_resinit.report.figures import order_figure as order_figure
from lit_resinit.report.figures import stream_figure as stream_figure
from lit_resinit.report.page import write_page as write_page
from lit_resinit.report.tables import history_table as history_table
