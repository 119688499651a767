"""Sweeps: many runs of one experiment, kept in a folder, resumable at any point."""
