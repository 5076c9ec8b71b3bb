"""Images that stay in files: lists of images, decoding processes, packed files."""
