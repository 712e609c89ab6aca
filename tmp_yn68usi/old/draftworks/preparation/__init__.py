"""Preparation: what can be proved about a stage while the one before it still runs."""
