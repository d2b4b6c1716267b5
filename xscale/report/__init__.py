"""A report of runs and of result files, on one HTML page."""
