"""Two-layer ReLU networks that interpolate: activation patterns, connecting paths, barriers that are proven."""
