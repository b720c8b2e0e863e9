"""The Hydra application: sweeper, isolated cells, one-line errors."""
