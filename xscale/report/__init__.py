"""Reports on runs and their models, on an HTML page or in the console."""
