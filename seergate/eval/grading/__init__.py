"""Grading of answers."""
