"""Start programs from a command line: the programs by name, and how they start under MPI."""
