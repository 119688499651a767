"""Two-layer ReLU networks: activation patterns, solution sets in norm balls, connecting paths."""
