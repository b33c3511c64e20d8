"""What an endpoint really does: whether it answers rightly, and how fast."""
