"""Putting it together: plan, run, journal, resume, verify."""
