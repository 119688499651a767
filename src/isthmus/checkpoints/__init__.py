"""Opening and writing models and adapters; each format in one place."""
