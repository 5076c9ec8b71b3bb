"""Rules that combine the vectors of all ranks even if some of the ranks are faulty."""
