"""EAGLE-3 (arXiv 2503.01840): the drafter's mathematics and its checkpoint formats."""
