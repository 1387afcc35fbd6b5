"""One bot per user."""
