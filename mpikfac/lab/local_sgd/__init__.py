"""Local SGD and similar methods: ranks step replicas of the model, which are then averaged."""
