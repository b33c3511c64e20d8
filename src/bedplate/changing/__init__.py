"""Changes of the engine behind a running endpoint: migrations, shadows, and the watch that proposes them."""
