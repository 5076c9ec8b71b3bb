"""Images that stay in files: lists of images, decoding by processes, packed files."""
