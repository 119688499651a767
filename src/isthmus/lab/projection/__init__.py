"""The experiments of output-space projection: digits, vision, text and language."""
