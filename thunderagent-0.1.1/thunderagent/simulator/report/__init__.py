"""The report of a comparison: a page with plots for people, CSV for spreadsheets, JSON for programs."""
