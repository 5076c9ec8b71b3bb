"""Split the channels of layers over the ranks of a group."""
