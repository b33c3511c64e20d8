"""Predicts the rows of published measurement tables with the estimator; reads the usual spellings and recipes."""
