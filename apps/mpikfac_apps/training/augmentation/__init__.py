"""How training images change from epoch to epoch: moves of images, and mixes of two images."""
