"""When models merge: pairs trained at many noise scales (Zhang et al. 2025, arXiv 2510.04686)."""
