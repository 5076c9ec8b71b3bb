"""Choose the length and momentum of steps with a quadratic model of the loss."""
