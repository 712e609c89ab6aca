"""Draftworks: a production line for EAGLE-3 drafters.

Nothing below this package imports Prefect: it also runs under torchrun, inside engine
processes and on hosts that have no orchestrator.
"""

__version__ = "0.1.0"
