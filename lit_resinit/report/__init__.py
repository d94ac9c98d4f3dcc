"""What was measured, for people: tables and figures."""

from lit_resinit.report.figures import activation_figure as activation_figure
from lit_resinit.report.tables import history_table as history_table
