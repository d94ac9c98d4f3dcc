"""The decision per branch, carried out and undone; runs no step."""
