"""Detection: drawn shapes, Mask R-CNNs of torchvision, average precision, and the training."""
