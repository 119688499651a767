"""Paths between models: curves, barriers, spectra and curvature along them."""
