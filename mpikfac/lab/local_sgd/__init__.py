"""Local SGD and similar methods: ranks train replicas of the model, which are then averaged."""
