"""Local SGD and methods like it: ranks step replicas of the model, which become one by means."""
