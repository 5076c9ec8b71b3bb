"""Change training images from epoch to epoch: shifts, mirroring, and mixes of two images."""
