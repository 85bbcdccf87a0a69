"""Measurements of the script `resident`, a file for each part."""
