"""Evaluation of exported encoders."""
