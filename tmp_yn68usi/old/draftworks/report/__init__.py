"""The final report: report.json and one page that needs nothing beside it."""
