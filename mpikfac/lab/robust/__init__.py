"""Rules that combine the vectors of all ranks even if some of them are wrong."""
