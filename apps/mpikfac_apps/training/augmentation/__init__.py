"""How training images change from epoch to epoch: shifts, mirroring, and mixes of two images."""
