"""Volumes in three dimensions: a brain cut into crops, and a network that names each voxel."""
