"""Object detection: drawn shapes, torchvision's Mask R-CNNs, average precision, and training."""
