"""Studies: many training runs of one file, their results, and the report about them."""
