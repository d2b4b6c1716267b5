"""Operators whose speed decides the step's, each with its meaning stated in plain torch."""
