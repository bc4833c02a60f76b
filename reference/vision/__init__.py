"""Models that see: a vision tower in front of the decoder, in LLaVA's layout.

Read `tower` (a picture becomes rows), then `sight` (rows in the engine), then `prompt` (where they
stand), `pictures` (what may come in) and `checkpoint` (the files). README.md tells it in order.
"""
