"""Start programs from a command line: find them by name, and run them under MPI."""
