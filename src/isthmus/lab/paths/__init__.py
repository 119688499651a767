"""The experiments with paths: when trained networks are joined by one, and by which."""
