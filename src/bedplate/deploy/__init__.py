"""A Plan as files for where it is to run; pure text, nothing is started."""
