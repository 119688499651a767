"""Figures, HTML reports and model cards."""
