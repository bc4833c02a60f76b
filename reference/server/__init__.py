"""The engine behind the APIs that other people's clients speak.

    python -m reference.server --model models/tiny --port 8000

Read in this order: `app` puts everything together. `protocol/` says which fields each API has,
`routes/` has one file for each family of APIs. All of them make a `calls.Call`, run it with
`generation` and write it as JSON or, by `streaming`, as events. `limits` and `keys` stand in front.
"""
