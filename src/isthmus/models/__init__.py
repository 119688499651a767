"""Running real networks: calibration data, their blocks, statistics of their activations."""
