"""The fields of each API: read strictly, and refused by name where the server cannot honour
them.
"""
