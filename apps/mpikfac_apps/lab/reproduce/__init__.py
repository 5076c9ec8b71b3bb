"""Compare published results with what this project predicts, measures or has recorded."""
