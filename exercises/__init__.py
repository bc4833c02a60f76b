"""Your side of the course: one file a lesson. `make check LESSON=02` checks what you wrote, `make
progress` shows the map.
"""
