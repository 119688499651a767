"""Small networks to experiment with, and the symmetries of some."""
