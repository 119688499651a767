"""Symmetries of weight space: groups on named axes, specs of architectures, matching."""
