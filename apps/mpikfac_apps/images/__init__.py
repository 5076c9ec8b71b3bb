"""Images that are read from files: lists of images, decoding processes, packed files."""
