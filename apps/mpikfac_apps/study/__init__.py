"""Studies: many training runs from a single file, results, and a report."""
