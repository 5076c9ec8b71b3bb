"""Published results beside what this project predicts, measures or has recorded."""
