"""Real classification corpora that ordinary packages ship, one a file."""
