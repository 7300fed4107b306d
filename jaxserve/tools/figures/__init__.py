"""Tables and plots of reports."""
