"""Euclidean geometry of points in weight space; manifolds come here."""
