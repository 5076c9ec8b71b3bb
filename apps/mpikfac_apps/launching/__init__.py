"""From a command line to a running program: the programs by name, and their start under MPI."""
