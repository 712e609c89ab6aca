"""How one step runs under Prefect: gates, preparation, jobs, reports."""
