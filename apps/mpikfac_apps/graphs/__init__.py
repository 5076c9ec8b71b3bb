"""Graph networks on a graph whose nodes are distributed over ranks."""
