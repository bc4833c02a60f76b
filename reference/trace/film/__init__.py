"""The animated picture of the front page, drawn from a recorded run of the engine."""
