"""Rules that combine the vectors of all ranks although some ranks may be wrong."""
