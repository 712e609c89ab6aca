"""Two ways, side by side in one run."""

from rich.console import Console
from rich.table import Table


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
