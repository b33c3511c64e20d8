"""Published tables of measurements and recipes: read as people write them, and answered by the estimator."""
