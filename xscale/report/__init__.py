"""The report of runs and their models, as an HTML page or in the console."""
