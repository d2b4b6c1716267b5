"""The report of runs and their models, on a page or in the console."""
