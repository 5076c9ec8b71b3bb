"""The report of a study: a page with tables, sentences and pictures, and tables as files."""
