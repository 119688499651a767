"""Real data, small experiments, and the demo."""
