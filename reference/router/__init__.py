"""One address in front of several servers of the same model, the replicas.

    python -m reference.router --replicas http://127.0.0.1:8001 http://127.0.0.1:8002

Requests that begin alike go to the same replica, because its prefix cache holds what they share.
With `--policy kv` the replicas tell what they hold. Read `policies` (who gets a request), then
`replicas` (who can get one), then `forward` (the way of one request, and what happens if its
replica dies), then `app`, which puts them together; for the policy kv `blocks` (who holds what) and
`cache_aware` (who gets a request then); `prefill` for prompts that another replica computes.
"""
