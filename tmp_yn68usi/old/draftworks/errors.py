"""The one kind of error that is meant for a person."""


class DraftworksError(Exception):
    """A fault somebody can act on: what was expected, what was found, what to do.

    Raised for bad input and failed checks. Retrying does not help, so nothing retries it;
    command line, job log and Prefect show its message without a traceback.
    """


class StopRequested(Exception):
    """The job was asked to end (SIGTERM). Everything done so far is committed."""
