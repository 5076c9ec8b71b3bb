"""The influence of training images on the loss of test images."""
