"""What the script `resident` measures, a file for each part."""
