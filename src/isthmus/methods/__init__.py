"""Merge methods: pure functions of stacked tensors, composed on a grid of stages."""
