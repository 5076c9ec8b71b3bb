"""Three-dimensional volumes: a brain cut into crops, and a network that classifies each voxel."""
