"""Rules that make one vector of the ranks' vectors, although some ranks may be wrong."""
