"""Estimates: what remains, as a range."""
