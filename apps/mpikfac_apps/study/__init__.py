"""Studies: many training runs from a single file, their results, and a report."""
