"""Graph networks on a graph whose nodes are dealt to ranks."""
