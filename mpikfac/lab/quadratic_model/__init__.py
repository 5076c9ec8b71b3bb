"""Length and momentum of a step from a quadratic model of the loss."""
