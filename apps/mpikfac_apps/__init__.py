"""Programs built on mpikfac; they use only what `mpikfac` itself exports."""
