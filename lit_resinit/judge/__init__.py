"""Closed? Alive, asleep, dead? One step, and those after it."""
