"""What the measurements say: which limit binds, and whether to stay or to migrate. Pure: values in, values out."""
