"""Optimizers that decide where training ends, and the noise they train with."""
