"""Length and momentum of a step by a quadratic model of the loss."""
