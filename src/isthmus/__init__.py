"""Isthmus merges neural networks, and says beforehand whether they will merge."""
