"""What stands between an exercise and the part of the engine that it is: a function each,
through(yours, original) -> what takes the part's place. `yours` solves the exercise; `original` is
what the lesson has, for calls that the exercise does not speak of.
"""
