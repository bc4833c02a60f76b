"""The exercises, solved: one file a lesson, and the source from which exercises/ is generated
(lessons/toolbox/exercises.py).
"""
